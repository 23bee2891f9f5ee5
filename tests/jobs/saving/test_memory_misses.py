"""What a rank reports while copies into memory fail again and again."""

from types import SimpleNamespace
from typing import Any

import pytest

from muster.jobs.saving import memory as module
from muster.jobs.saving.memory import MemorySaver


class Misses:
    """A reporter that keeps the texts."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def missed(self, *, step: int, missed: int, message: str) -> None:
        self.said.append(message)


@pytest.mark.parametrize(("tell_s", "count"), [(0.0, 3), (1000.0, 1)])
def test_a_row_of_failed_copies_is_reported_with_its_length(
    monkeypatch: pytest.MonkeyPatch, tell_s: float, count: int
) -> None:
    monkeypatch.setattr(module, "TELL_S", tell_s)
    monkeypatch.setattr("time.monotonic", lambda: now)
    saver: Any = MemorySaver.__new__(MemorySaver)
    saver.missed, saver.reporter = 0, Misses()
    for step, now in ((5, 1000.0), (10, 1030.0), (15, 1070.0)):
        saver._miss(
            SimpleNamespace(order=SimpleNamespace(step=step), began_s=now - 10.0),
            "no copy on n2: hung up",
            by_writer=False,
        )
    assert (
        saver.reporter.said
        == [
            "a copy in memory has failed: no copy on n2: hung up",
            "no copy in memory has succeeded for 40 s (2 in a row): no copy on n2: hung up",
            "no copy in memory has succeeded for 80 s (3 in a row): no copy on n2: hung up",
        ][:count]
    )
