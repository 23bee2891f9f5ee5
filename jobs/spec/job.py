"""The typed job: the contents of a job file, with defaults filled in.

Every model refuses unknown keys and wrong types. Other checks need more than one model: `jobs/spec/load.py` checks the
kind of job and adds line numbers to errors, `jobs/hosts/placement.py` checks the world size.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny, field_validator, model_validator
from typing_extensions import Self

from muster.jobs.spec.failover import CheckpointSettings, RestartSettings
from muster.jobs.spec.passable import MAX_STRING_BYTES, Passable
from muster.jobs.spec.python import Python
from muster.jobs.spec.slurm import SlurmSettings
from muster.jobs.spec.strict import Strict

MAX_NODES: Final = 100_000
MAX_RANKS_PER_NODE: Final = 1024

MAX_THREADS: Final = 1024
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _is_variable(name: str) -> str:
    """Check that a text is a valid name of an environment variable in any POSIX shell."""
    if not VARIABLE.fullmatch(name):
        raise ValueError(
            f"the name of a variable may have only letters, digits and _, and must not begin with a digit, got {name!r}"
            "; correct it"
        )
    return name


Variable = Annotated[str, AfterValidator(_is_variable)]


class CommandSettings(Strict):
    """`command:` - any program that reads torchrun's environment variables; every rank starts its own process."""

    argv: Annotated[list[Passable], Field(min_length=1)]

    @field_validator("argv")
    @classmethod
    def _names_a_program(cls, argv: list[str]) -> list[str]:
        if not argv[0]:
            raise ValueError("the first item is the program to run, and it is empty; name one")
        return argv


class Job(Strict):
    """A whole job file. `kind` is the key of its section (`train`, `command`, `bench`); `settings` has its content."""

    name: str = Field(
        "job",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="the name of the job's runs: letters, digits, `.`, `_` and `-`, at most 64 characters",
        examples=["vgg11-digits"],
    )
    nodes: int = Field(1, ge=1, le=MAX_NODES, description="machines, or simulated nodes with `--on local`")
    ranks_per_node: Annotated[int, Field(ge=1, le=MAX_RANKS_PER_NODE)] | Literal["slots"] = Field(
        1, description="processes on each node; `slots`: the number of slots of each host in the hosts file"
    )
    threads_per_rank: Annotated[int, Field(ge=1, le=MAX_THREADS)] | Literal["auto"] = Field(
        1,
        description="CPU threads of each rank (`OMP_NUM_THREADS`); `auto`: the cores of the node divided by its ranks",
    )
    env: dict[Variable, Passable] = Field(
        default_factory=dict,
        description="environment variables of every rank",
        examples=[{"NCCL_DEBUG": "WARN"}],
    )
    workdir: str | None = Field(
        None,
        description="the folder in which ranks start, relative to the job file; default: where `muster` is called",
        examples=["."],
    )
    python: Python | None = Field(None, examples=["/shared/envs/torch/bin/python"])
    setup: list[str] = Field(
        default_factory=list,
        description="shell lines, run once on each node before its ranks; the ranks get the exported variables",
        examples=[["module load cuda"]],
    )
    start_timeout_s: float = Field(60.0, gt=0.0, description="time limit in seconds for all ranks to start and connect")
    rendezvous_timeout_s: float = Field(
        1800.0,
        gt=0.0,
        description="for a program (`command:`): time limit in seconds for all ranks to reach the rendezvous after the "
        "first one; until then there is none",
        examples=[7200],
    )
    grace_s: float = Field(5.0, ge=0.0, description="seconds between SIGTERM and SIGKILL when a run is stopped")
    hang_s: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="seconds without progress on any rank after which the attempt fails; default: 30, or 10 times the "
        "slowest step if longer. For a program without a session: seconds without output; default: no limit",
        examples=[120],
    )
    checkpoint: CheckpointSettings | None = Field(
        None, description="when to save; without it nothing is saved", examples=[{"every_s": 300}]
    )
    restart: RestartSettings | None = Field(
        None, description="how to react to failures; without it nothing is restarted", examples=[{"max": 5}]
    )
    slurm: SlurmSettings = Field(
        SlurmSettings(), description="options for Slurm", examples=[{"partition": "batch", "time": "01:00:00"}]
    )
    kind: str
    settings: SerializeAsAny[BaseModel]

    @model_validator(mode="after")
    def _meets_by_itself(self) -> Self:
        if self.kind not in ("", "command") and "rendezvous_timeout_s" in self.model_fields_set:
            raise ValueError(
                f"rendezvous_timeout_s is for command: jobs; the ranks of a {self.kind}: job have start_timeout_s to "
                "meet; remove it"
            )
        return self

    @model_validator(mode="after")
    def _can_be_saved(self) -> Self:
        if self.checkpoint is not None and self.kind not in ("train", "command"):
            raise ValueError(
                f"checkpoint is for train: and command: jobs; a {self.kind}: job saves no checkpoints; remove it"
            )
        return self

    @model_validator(mode="after")
    def _can_continue_in_place(self) -> Self:
        if self.restart is not None and self.restart.in_place and self.kind not in ("", "train"):
            raise ValueError(
                f"restart.in_place is for train: jobs; the ranks of a {self.kind}: job always restart; remove it"
            )
        return self

    @model_validator(mode="after")
    def _has_a_program(self) -> Self:
        if self.python is not None and self.kind not in ("", "command", "train"):
            raise ValueError(
                f"python is for command: and train: jobs; the ranks of a {self.kind}: job run in Muster's own Python, "
                "which the site file sets as interpreter; remove it"
            )
        return self

    @field_validator("env")
    @classmethod
    def _fits_a_process(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if (size := len(f"{name}={value}".encode(errors="replace")) + 1) > MAX_STRING_BYTES:
                limit = f"with its name and = it must be shorter than {MAX_STRING_BYTES} bytes, which is Linux's limit"
                raise ValueError(f"{name}: {limit}, got {size}")
        return env


@dataclass(frozen=True)
class Unread:
    """A key that was given but has no effect. `is_default`: its value equals the default."""

    key: tuple[str, ...]
    text: str
    is_default: bool


@dataclass(frozen=True)
class JobKind:
    """One kind of job: its key in the file, the type of its section, and the code that a rank runs.

    `entry` is a "module:function", which a process forked from the warm process calls with the payload of the start
    message. `entry` is None for a program that each rank starts itself. `check(settings, world_size)` raises
    RefusedError if they do not fit. `unread(settings)` lists the keys that have no effect.
    """

    key: str
    settings: type[BaseModel]
    entry: str | None
    check: Callable[[Any, int], None]
    unread: Callable[[Any], Sequence[Unread]] = lambda settings: ()
