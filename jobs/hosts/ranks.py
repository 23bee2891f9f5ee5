"""The rank environment: the one module that writes, reads and detects rank variables.

The names are torchrun's, so that any program that runs under torchrun runs under Muster; what is ours alone
starts with MUSTER_:

    MUSTER_RUN_ID, MUSTER_RUN_DIR    the run
    MUSTER_STATUS_FD                 the pipe for reports (jobs/node/reports.py), as fd:inode
    MUSTER_PAGE                      the page shared with the keeper (jobs/node/page.py), as fd:inode; of a program
    MUSTER_FILES                     a folder for a program's own files, the same in all attempts
    MUSTER_SESSION                   what `muster.session()` needs to know of the job, as JSON
    MUSTER_STOP_FILE                 written before SIGTERM: why a program should stop, and until when
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


@dataclass(frozen=True)
class RankEnv:
    """Where one rank stands in its world, and where its world meets."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    master_addr: str
    master_port: int
    attempt: int = 0
    run_id: str = ""
    run_dir: str = ""
    agent_store: bool = False

    def variables(self) -> dict[str, str]:
        """Spell this rank out as environment variables, torchrun's names first."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_RUN_ID": self.run_id or "none",
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
        }
        if self.run_id:
            variables[RUN_ID] = self.run_id
        if self.run_dir:
            variables[RUN_DIR] = self.run_dir
        return variables


OF_A_RANK: Final = frozenset(RankEnv(0, 1, 0, 1, 0, 1, "", 0, run_id="-", run_dir="-").variables()) | {
    STATUS_FD,
    STOP_FILE,
    PAGE,
    FILES,
    SESSION,
}


def descriptor_text(descriptor: int) -> str:
    """Spell an open descriptor as `fd:inode`, for a variable that `inherited` reads."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def inherited(environ: Mapping[str, str], name: str) -> int | None:
    """Return the descriptor that a variable names as `fd:inode`.

    Return None if the variable is not set, or if the descriptor is closed or another file by now: in a process that
    some other program has started, the number may mean anything.
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
    """Read the variables that `RankEnv.variables` or torchrun wrote.

    Raises:
        RefusedError: a variable is missing or is not a number.
    """
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1)
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        node_rank=_number(environ, "GROUP_RANK", rank // local_world_size),
        nodes=_number(environ, "GROUP_WORLD_SIZE", -(-world_size // local_world_size)),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", DEFAULT_MASTER_PORT),
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        run_id=environ.get(RUN_ID, ""),
        run_dir=environ.get(RUN_DIR, ""),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise RefusedError(f"environment: {name} is not set; start this through muster, torchrun, srun or mpirun")
        return default
    if not text.isdecimal():
        raise RefusedError(f"environment: {name} must be a whole number, got {text!r}")
    return int(text)
