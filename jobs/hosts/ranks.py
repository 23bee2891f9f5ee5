"""The environment variables of a rank, which only this module reads and writes.

The names are torchrun's, so that any program that runs under torchrun runs under Muster. Muster's own names start with
MUSTER_:

    MUSTER_RUN_ID, MUSTER_RUN_DIR    the run
    MUSTER_STATUS_FD                 the pipe for reports (jobs/node/reports.py), as fd:inode
    MUSTER_PAGE                      for programs: the page shared with the rank parent (jobs/node/page.py), as fd:inode
    MUSTER_FILES                     a folder for a program's own files, shared by all attempts
    MUSTER_SESSION                   the settings of the job that `muster.session()` needs, as JSON
    MUSTER_MEMORY                    a folder in memory for copies of the state (jobs/saving/memory.py)
    MUSTER_STOP_FILE                 a file that is written before SIGTERM: the reason to stop, and the deadline
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import RefusedError

DEFAULT_MASTER_PORT: Final = 29500

RUN_ID: Final = "MUSTER_RUN_ID"
RUN_DIR: Final = "MUSTER_RUN_DIR"
STATUS_FD: Final = "MUSTER_STATUS_FD"
STOP_FILE: Final = "MUSTER_STOP_FILE"
PAGE: Final = "MUSTER_PAGE"
FILES: Final = "MUSTER_FILES"
SESSION: Final = "MUSTER_SESSION"
MEMORY: Final = "MUSTER_MEMORY"

# The fields of RankEnv with their variables: torchrun's, and Muster's own.
VARIABLES: Final[Mapping[str, str]] = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "nodes": "GROUP_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "attempt": "TORCHELASTIC_RESTART_COUNT",
    "run_id": RUN_ID,
    "run_dir": RUN_DIR,
    "agent_store": "TORCHELASTIC_USE_AGENT_STORE",
}
PASS_FLAGS: Final = "pass --rank, --num-nodes and --master-ip"
THROUGH_A_LAUNCHER: Final = "start this through muster, torchrun, srun or mpirun"


@dataclass(frozen=True)
class RankEnv:
    """The position of one rank in its world, and the master address and port."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    master_addr: str = ""  # "" and 0 mean that it is not known yet
    master_port: int = 0
    attempt: int = 0
    run_id: str = ""
    run_dir: str = ""
    agent_store: bool = False

    def variables(self) -> dict[str, str]:
        """Return this rank as environment variables, torchrun's names first."""
        given = {name: str(getattr(self, field)) for field, name in VARIABLES.items()}
        others = {
            "ROLE_RANK": given["RANK"],
            "ROLE_WORLD_SIZE": given["WORLD_SIZE"],
            "ROLE_NAME": "default",
            "NODE_RANK": given["GROUP_RANK"],
            "TORCHELASTIC_RUN_ID": self.run_id or "none",
        }
        return {**{name: value for name, value in given.items() if value or name not in (RUN_ID, RUN_DIR)}, **others}


def variables_of_one(rank: int, local_rank: int) -> dict[str, str]:
    """Return the environment variables whose values differ between the ranks of a node."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank)}


OF_A_RANK: Final = frozenset(RankEnv(0, 1, 0, 1, 0, 1, "", 0, run_id="-", run_dir="-").variables()) | {
    STATUS_FD,
    STOP_FILE,
    PAGE,
    FILES,
    SESSION,
    MEMORY,
}


def descriptor_text(descriptor: int) -> str:
    """Format an open descriptor as `fd:inode`, for a variable that `inherited` reads."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def inherited(environ: Mapping[str, str], name: str) -> int | None:
    """Return the descriptor that a variable names as `fd:inode`.

    Return None if the variable is not set, or if the descriptor is closed or refers to another file. In a process
    that the program started, the number may refer to anything.
    """
    number, _, inode = environ.get(name, "").partition(":")
    if not (number.isdecimal() and inode.isdecimal()):
        return None
    try:
        status = os.fstat(int(number))
    except (OSError, OverflowError):
        return None
    is_kind = stat.S_ISFIFO if name == STATUS_FD else stat.S_ISREG
    return int(number) if status.st_ino == int(inode) and is_kind(status.st_mode) else None


def read(environ: Mapping[str, str]) -> RankEnv:
    """Read the variables written by `RankEnv.variables` or torchrun.

    Raises:
        RefusedError: if a variable is missing or is not a number.
    """
    rank, world_size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    local_world_size = number(environ, "LOCAL_WORLD_SIZE", 1)
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=number(environ, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        node_rank=number(environ, "GROUP_RANK", rank // local_world_size),
        nodes=number(environ, "GROUP_WORLD_SIZE", -(-world_size // local_world_size)),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number(environ, "MASTER_PORT", DEFAULT_MASTER_PORT),
        attempt=number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        run_id=environ.get(RUN_ID, ""),
        run_dir=environ.get(RUN_DIR, ""),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
    )


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a variable that must be a whole number.

    Raises:
        RefusedError: if the variable is missing and has no default, or is not a whole number.
    """
    text = environ.get(name)
    if text is None:
        if default is None:
            advice = THROUGH_A_LAUNCHER if name in VARIABLES.values() else PASS_FLAGS
            raise RefusedError(f"environment: {name} is not set; {advice}")
        return default
    if not (text.isascii() and text.isdecimal()):
        raise RefusedError(f"environment: {name} must be a whole number, got {text!r}")
    return int(text)
