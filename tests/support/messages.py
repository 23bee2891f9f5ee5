"""Messages of agents, with whatever a test does not care for filled in."""

from typing import Any

from muster.launch.wire.messages import Exited, Hello


def hello(**fields: Any) -> Hello:
    """The greeting of a node with two cores."""
    usual: dict[str, Any] = {
        "host": "n0",
        "pid": 7,
        "pid_start": 1,
        "slurm_name": "",
        "address": "10.10.1.9",
        "python": "3.11.7",
        "torch": True,
        "cores": (0, 1),
        "gpus": (),
        "environ": {},
        "time": 1.0,
    }
    return Hello(**{**usual, **fields})


class Channel:
    """An agent's end, which keeps whatever is posted."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, message: Any) -> None:
        self.posted.append(message)

    def abort(self) -> None:
        pass


def exited(rank: int, code: int | None, **fields: Any) -> Exited:
    """The end of a rank."""
    usual: dict[str, Any] = {"attempt": 0, "signal": None, "sent": None, "ended": 1.0, "failure": {}, "steps": None}
    return Exited(**{**usual, "last_lines": (), **fields, "rank": rank, "code": code})
