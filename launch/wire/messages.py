"""Every message of the control channel, by direction. `codec.py` encodes and decodes them.

A node can send only the messages in FROM_AGENT; nothing else reaches a handler of the supervisor. All of these except
Hello name the attempt that they are about. Times are Unix seconds on the sender's clock.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from muster.launch.wire.codec import Bound, table
from muster.launch.wire.records import (
    Address,
    Attempt,
    Count,
    ExitCode,
    Facts,
    Failure,
    Leftover,
    Line,
    Name,
    Nothing,
    Pid,
    Port,
    Progress,
    Rank,
    RankReport,
    RankStacks,
    Seconds,
    Signal,
    Text,
    Ticks,
    Warm,
    Words,
)

# To the supervisor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message of an agent. The transport or the handshake has identified the node."""

    host: Name
    pid: Pid
    pid_start: Ticks
    slurm_name: Name
    address: Address  # the address at which the supervisor reached this node
    python: Name
    torch: bool
    cores: tuple[Annotated[int, Bound(0, 1 << 20)], ...]
    gpus: Annotated[tuple[Name, ...], Bound(most=1 << 10)]
    environ: Annotated[dict[Name, Annotated[str, Bound(most=1 << 16)]], Bound(most=16)]
    time: Seconds


@dataclass(frozen=True)
class Heartbeat:
    """The answer to a Beat: when the beat was sent, received and answered, and the progress of the ranks.

    `late_s`: the agent's recent scheduling delay, for lack of a processor or because of a slow disk.
    """

    attempt: Attempt
    sent: Seconds
    heard: Seconds
    time: Seconds
    progress: Progress | None = None
    late_s: Seconds = 0.0


@dataclass(frozen=True)
class Inspected:
    """The answer to an Inspect."""

    attempt: Attempt
    facts: Facts


@dataclass(frozen=True)
class Prepared:
    """Node 0 has bound the store's port. `bound`: the address at which it listens, "" for every address."""

    attempt: Attempt
    port: Port
    bound: Address
    addresses: tuple[tuple[Name, Address], ...]  # (interface, address) of node 0


@dataclass(frozen=True)
class Reached:
    """The answer to a Reach: whether this node reaches the store, and where it keeps its part of the run folder."""

    attempt: Attempt
    interface: Name
    address: Address
    why: Text
    code: Name
    storage: Literal["shared", "apart", "none"]
    run: Text
    storage_why: Text


@dataclass(frozen=True)
class Started:
    """The processes of a node's ranks: (rank, pid, start ticks); ticks are None if the process has ended."""

    attempt: Attempt
    ranks: tuple[tuple[Rank, Pid, Ticks | None], ...]
    time: Seconds


@dataclass(frozen=True)
class Report:
    """A report of a rank, such as its progress; or the same report of several ranks, such as their arrival."""

    attempt: Attempt
    ranks: Annotated[tuple[Rank, ...], Bound(most=1 << 12)]
    report: RankReport


@dataclass(frozen=True)
class Exited:
    """The end of a rank: its exit code or signal, the last signal that the rank parent sent, and the rank's reason."""

    attempt: Attempt
    rank: Rank
    code: ExitCode | None
    signal: Signal | None
    sent: Signal | None
    ended: Seconds
    failure: Failure | Nothing
    steps: Count | None
    last_lines: Annotated[tuple[Text, ...], Bound(most=64)]


@dataclass(frozen=True)
class Exits:
    """The ends of ranks that were ordered to stop."""

    attempt: Attempt
    ranks: Annotated[tuple[Exited, ...], Bound(most=64)]


@dataclass(frozen=True)
class Held:
    """A rank waits before its next step, after `steps` steps."""

    attempt: Attempt
    steps: Annotated[int, Bound(0, (1 << 53) - 1)]  # so that `steps` + 1 fits into a StopAt


@dataclass(frozen=True)
class Stacks:
    """The stacks of this node's hung ranks."""

    attempt: Attempt
    ranks: Annotated[tuple[RankStacks, ...], Bound(most=1 << 12)]


@dataclass(frozen=True)
class Swept:
    """All processes of the attempt on this node have ended, except `left`."""

    attempt: Attempt
    swept: Count
    left: tuple[Leftover, ...]


@dataclass(frozen=True)
class Log:
    """Lines printed by one of the ranks that the console shows."""

    attempt: Attempt
    rank: Rank
    stream: Literal["out", "err"]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class File:
    """A piece of a file from a node that does not share the run folder."""

    attempt: Attempt
    name: Name
    offset: Count
    data: Annotated[bytes, Bound(most=1 << 18)]


@dataclass(frozen=True)
class Terminated:
    """The agent has received SIGTERM, so a scheduler will probably end its node's processes."""

    attempt: Attempt


@dataclass(frozen=True)
class Broken:
    """The node has failed as a whole. `gone`: all its ranks have ended."""

    attempt: Attempt
    why: Text
    code: ExitCode
    gone: bool = False


@dataclass(frozen=True)
class Ready:
    """The rank parent has finished its imports."""

    attempt: Attempt
    pid: Pid


@dataclass(frozen=True)
class Keeping:
    """The answer to a KeepCopies: the port at which other nodes reach this node's memory, or `why` there is none."""

    attempt: Attempt
    port: Annotated[int, Bound(0, 65_535)]
    why: Text = ""


@dataclass(frozen=True)
class Kept:
    """The shard of a rank is in this node's memory. `name`: of the checkpoint; `writers`: how many shards it has."""

    attempt: Attempt
    name: Name
    writer: Rank
    writers: Annotated[int, Bound(1, 1 << 20)]
    bytes: Count
    sha256: Name


@dataclass(frozen=True)
class Fetched:
    """The answer to a Fetch: the SHA-256 of the manifest, or `why` this node does not have the checkpoint."""

    attempt: Attempt
    name: Name
    sha256: Name
    why: Text = ""


FromAgent = (
    Hello | Heartbeat | Inspected | Prepared | Reached | Started | Report | Exited | Exits | Held | Stacks | Swept | Log
    | File | Terminated | Broken | Ready | Keeping | Kept | Fetched
)  # fmt: skip
FROM_AGENT: Final = table(*get_args(FromAgent))


# To the agent --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """A sign of life from the supervisor, which the agent answers with a Heartbeat.

    `ranks`: also report the progress of every single rank.
    """

    sent: Seconds
    ranks: bool = True


@dataclass(frozen=True)
class Inspect:
    """A request for facts about a node. launch/node/nodefacts.py lists the fact for each field."""

    run: Text = ""
    nonce: Name = ""
    mark: Name = ""
    peer: Address = ""
    port: Port = 1
    iface: Name = ""
    program: Text = ""
    script: Text = ""
    folder: Text = ""
    python: Words = ()


@dataclass(frozen=True)
class Prepare:
    """An order to bind the store's port at an address, or at the address of an interface or network (`iface`)."""

    attempt: Attempt
    bind: Name
    iface: Name = ""


@dataclass(frozen=True)
class Reach:
    """An order to connect to the store once, and to look for the run folder."""

    attempt: Attempt
    address: Name
    port: Port
    iface: Name
    run: Text
    nonce: Name


@dataclass(frozen=True)
class Start:
    """An order to start this node's ranks, from launch/plan/plan.py. `ranks` go unchanged to the rank parent.

    `joins`: start them besides the ranks that work, to wait until they can join.
    """

    attempt: Attempt
    node: Count
    attempt_dir: Text
    apart: bool
    workdir: Text
    setup: tuple[Line, ...]
    store: bool
    master_port: Annotated[int, Bound(0, 65_535)]
    warm: Warm
    console: tuple[Rank, ...]
    ranks: Annotated[tuple[dict[str, Any], ...], Bound(most=1 << 12)]
    joins: bool = False


@dataclass(frozen=True)
class Hold:
    """An order to make every rank wait before its next step."""

    attempt: Attempt


@dataclass(frozen=True)
class StopAt:
    """An order to make every rank save and end after `steps` steps; `regroups`: wait for the next attempt instead."""

    attempt: Attempt
    steps: Count
    regroups: bool = False


@dataclass(frozen=True)
class Dump:
    """A request for the Python stacks of all ranks."""

    attempt: Attempt


@dataclass(frozen=True)
class StopRanks:
    """An order to end this node's ranks: SIGTERM, SIGKILL after the grace period, a sweep. Programs see `reason`."""

    attempt: Attempt
    grace_s: Seconds
    reason: Name = ""
    text: Text = ""


@dataclass(frozen=True)
class KeepCopies:
    """An order to keep checkpoints in memory, reachable at the address `bind` with the key `secret`."""

    attempt: Attempt
    secret: Name
    bind: Name


@dataclass(frozen=True)
class CopyTo:
    """The node that keeps copies of this node's shards; `address` is "" if there is none."""

    attempt: Attempt
    node: Name
    address: Name
    port: Annotated[int, Bound(0, 65_535)]


@dataclass(frozen=True)
class Complete:
    """All nodes have their parts of a checkpoint in memory, so older ones are deleted; with `only`, all others."""

    attempt: Attempt
    name: Name
    only: bool = False


Source = tuple[Name, Port, tuple[tuple[Rank, Rank], ...]]


@dataclass(frozen=True)
class Fetch:
    """An order to prepare the reading of a checkpoint in memory: verify the shards here, and get the manifest.

    One node `collects` the records of all shards. `sources` are then (address, port, (first rank, last rank), …) of
    the nodes that have shards. For all other nodes it is the collecting node alone, without ranks.
    """

    attempt: Attempt
    name: Name
    secret: Name
    writers: Annotated[int, Bound(1, 1 << 20)]
    collects: bool
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Bye:
    """The run is over, with this exit code."""

    code: ExitCode


ToAgent = (
    Beat | Inspect | Prepare | Reach | Start | Hold | StopAt | Dump | StopRanks | KeepCopies | CopyTo | Complete | Fetch
    | Bye
)  # fmt: skip
TO_AGENT: Final = table(*get_args(ToAgent))
