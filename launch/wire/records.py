"""The types of message fields: numbers and texts with their bounds, and records."""

from typing import Annotated, Final, Literal, TypedDict

from muster.jobs.machine.linux import signal_name
from muster.launch.wire.codec import ANY_FLOAT, Bound

MOST_RANKS: Final = 1 << 20
MOST_TOLD: Final = 64  # maximum number of ranks in the progress of a heartbeat
Attempt = Annotated[int, Bound(0, 1 << 20)]
Rank = Annotated[int, Bound(0, MOST_RANKS)]
Pid = Annotated[int, Bound(1, 1 << 31)]
Ticks = Annotated[int, Bound(0, 1 << 53)]
Count = Annotated[int, Bound(0, 1 << 53)]
Port = Annotated[int, Bound(1, 65_535)]
Seconds = Annotated[float, Bound(0, 1e12)]
Real = Annotated[float, ANY_FLOAT]
Name = Annotated[str, Bound(most=256)]
Text = Annotated[str, Bound(most=1 << 13)]
Words = Annotated[tuple[Annotated[str, Bound(most=1 << 18)], ...], Bound(most=1 << 10)]  # the arguments of a command
Line = Annotated[str, Bound(most=1 << 20)]
ExitCode = Annotated[int, Bound(0, 255)]
Address = Annotated[str, Bound(most=64)]
Signal = Annotated[str, Bound(words=frozenset(signal_name(number) for number in range(1, 65)))]


class _RankProgress(TypedDict):
    phase: Name
    steps: Count
    beats_age_s: Seconds
    state: Annotated[str, Bound(most=1)]


class RankProgress(_RankProgress, total=False):
    """The progress of one rank. `state`: its process state (a letter, proc(5)), "" if it was active recently.

    `gpu`: the utilization of its GPU in percent, and the bytes of GPU memory in use.
    """

    gpu: tuple[Count, Count]


class Progress(TypedDict):
    """The progress of a node's ranks (launch/node/pulse.py)."""

    steps: Count
    phases: Annotated[tuple[Name, ...], Bound(most=64)]
    beats_age_s: Seconds
    slowest_s: Seconds
    sessions: Count
    output_age_s: Seconds | None
    ranks: Annotated[dict[Name, RankProgress], Bound(most=MOST_TOLD)]


class Arrived(TypedDict):
    """A rank is about to enter the rendezvous (arrived), or has completed it (joined)."""

    report: Literal["arrived", "joined"]


class _StepReport(TypedDict):
    report: Literal["progress"]
    step: Count


class StepReport(_StepReport, total=False):
    """The progress of training. A user's program may report only its step."""

    steps: Count
    loss: Real
    rate: Real
    unit: Name


class Loaded(TypedDict):
    """A rank has loaded the state of a checkpoint."""

    report: Literal["loaded"]
    step: Count
    seconds: Seconds
    checkpoint: Name


class FirstStep(TypedDict):
    """The first step of an attempt is done."""

    report: Literal["first_step"]
    step: Count


class ReplicaGroups(TypedDict):
    """The groups of ranks with copies of the same state, as (first, count, stride): one of each must live.

    `why`: the reason if there are none. `reloads`: any number of ranks can continue from a checkpoint in memory.
    """

    report: Literal["replicas"]
    groups: Annotated[tuple[tuple[Rank, Rank, Rank], ...], Bound(most=1 << 12)]
    why: Text
    reloads: bool


class Waiting(TypedDict):
    """A rank has left attempt `of` after `step` complete steps, and waits for the next one."""

    report: Literal["waiting"]
    of: Attempt
    step: Count
    why: Text


class Regrouped(TypedDict):
    """All ranks have the state of living ranks after `step` steps. `redone`: how many ranks were a step behind."""

    report: Literal["regrouped"]
    step: Count
    redone: Count
    source: Rank
    seconds: Seconds


class Replayed(TypedDict):
    """Steps of an earlier attempt have been repeated."""

    report: Literal["replayed"]
    steps: Count
    seconds: Seconds
    compared: Count
    worst: Real


class CheckpointSaved(TypedDict):
    """A checkpoint has been committed."""

    report: Literal["saved"]
    step: Count
    checkpoint: Name
    stall_s: Seconds
    seconds: Seconds
    bytes: Count


class Missed(TypedDict):
    """A save failed or was skipped."""

    report: Literal["missed"]
    step: Count
    missed: Count
    message: Text


RankReport = (  # see jobs/node/reports.py
    StepReport
    | Arrived
    | FirstStep
    | CheckpointSaved
    | Loaded
    | Replayed
    | Missed
    | ReplicaGroups
    | Waiting
    | Regrouped
)


class _Failure(TypedDict):
    report: Literal["failed"]
    kind: Name
    message: Text
    peer: bool
    time: Seconds


class Failure(_Failure, total=False):
    """The reason that a rank reports for its failure (jobs/node/reports.py)."""

    step: Count


class Nothing(TypedDict):
    """The rank gave no reason."""


class _Stack(TypedDict):
    rank: Rank
    state: Annotated[str, Bound(most=1)]
    lines: Annotated[tuple[Line, ...], Bound(most=256)]


class RankStacks(_Stack, total=False):
    """The stacks of one hung rank, and its progress."""

    phase: Name
    steps: Count


class Leftover(TypedDict):
    """A process that survives SIGKILL."""

    pid: Pid
    state: Name
    name: Name
    rank: Rank | None


class NodeMemory(TypedDict):
    """Memory of a node in MiB."""

    total_mib: Count
    available_mib: Count


class Limits(TypedDict):
    """Limits on open files; -1 means unlimited."""

    open_files: int
    open_files_hard: int


class _Storage(TypedDict):
    where: Literal["shared", "apart", "none"]
    path: Text
    why: Text


class Storage(_Storage, total=False):
    """The place where a node would keep its part of a run folder."""

    free_mib: Count


class Facts(TypedDict, total=False):
    """Facts about a node: resources, software, and what it reaches (launch/node/nodefacts.py)."""

    host: Name
    machine: Name
    python: Name
    executable: Text
    root: Text
    code: Name
    commit: Name | None
    torch: Name | None
    muster: Name | None
    cores: Count
    memory: NodeMemory
    gpus: Annotated[tuple[Name, ...], Bound(most=1 << 10)]
    limits: Limits
    program: Text
    storage: Storage
    route: tuple[Name, Name] | None
    connect: Text
    failed: dict[Name, Text]


class Warm(TypedDict):
    """A node's warm process: its imports, its environment, and the command of its Python (empty: the agent's)."""

    preload: Text
    env: dict[str, Annotated[str, Bound(most=1 << 20)]]
    python: Words
