"""Every message of the control channel, by direction; `codec.py` reads and writes them.

A node can send what stands in FROM_AGENT, and nothing else reaches a handler of the supervisor. Field names carry
units. All messages but Hello are about one attempt; times are unix seconds by the sender's clock.
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
    Seconds,
    Signal,
    Stack,
    Text,
    Ticks,
    Warm,
    Words,
)

# To the supervisor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message of an agent. Which node it is, the transport or the handshake has said."""

    host: Name
    pid: Pid
    pid_start: Ticks
    slurm_name: Name
    address: Address  # by which the supervisor reached this node
    python: Name
    torch: bool
    cores: tuple[Annotated[int, Bound(0, 1 << 20)], ...]
    gpus: Annotated[tuple[Name, ...], Bound(most=1 << 10)]
    environ: Annotated[dict[Name, Annotated[str, Bound(most=1 << 16)]], Bound(most=16)]
    time: Seconds


@dataclass(frozen=True)
class Heartbeat:
    """The answer to a Beat: when it was sent, received and answered, and how far the ranks are.

    `late_s` is how late the agent itself has been of late, for lack of a processor or behind a slow disk.
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
    """Node 0 has bound the store's port. `bound` is the address it listens at, "" for every address."""

    attempt: Attempt
    port: Port
    bound: Address
    addresses: tuple[tuple[Name, Address], ...]  # (interface, address) of node 0


@dataclass(frozen=True)
class Reached:
    """Whether this node reaches the store, and where it keeps its part of the run folder."""

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
    """The processes of a node's ranks: (rank, pid, start ticks); no ticks for one that had ended already."""

    attempt: Attempt
    ranks: tuple[tuple[Rank, Pid, Ticks | None], ...]
    time: Seconds


@dataclass(frozen=True)
class Report:
    """What a rank reports."""

    attempt: Attempt
    rank: Rank
    report: RankReport


@dataclass(frozen=True)
class Exited:
    """A rank has ended: by a code or a signal, after which signal of ours, and why in its own words."""

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
class Held:
    """A rank waits between two steps, after so many."""

    attempt: Attempt
    steps: Annotated[int, Bound(0, (1 << 53) - 1)]  # one more can be said in a StopAt


@dataclass(frozen=True)
class Stacks:
    """The stacks of this node's hung ranks."""

    attempt: Attempt
    ranks: Annotated[tuple[Stack, ...], Bound(most=1 << 12)]


@dataclass(frozen=True)
class Swept:
    """Nothing of the attempt is left on this node but `left`."""

    attempt: Attempt
    swept: Count
    left: tuple[Leftover, ...]


@dataclass(frozen=True)
class Log:
    """What a rank of the console has printed."""

    attempt: Attempt
    rank: Rank
    stream: Literal["out", "err"]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class File:
    """A piece of a file of a node that does not share the run folder."""

    attempt: Attempt
    name: Name
    offset: Count
    data: Annotated[bytes, Bound(most=1 << 18)]


@dataclass(frozen=True)
class Terminated:
    """The agent has received SIGTERM: somebody ends this node."""

    attempt: Attempt


@dataclass(frozen=True)
class Broken:
    """The node has failed as a whole. `gone`: its ranks have ended with it."""

    attempt: Attempt
    why: Text
    code: ExitCode
    gone: bool = False


@dataclass(frozen=True)
class Ready:
    """The rank parent has imported what it needs."""

    attempt: Attempt
    pid: Pid


FromAgent = (
    Hello | Heartbeat | Inspected | Prepared | Reached | Started | Report | Exited | Held | Stacks | Swept | Log | File
    | Terminated | Broken | Ready
)  # fmt: skip
FROM_AGENT: Final = table(*get_args(FromAgent))


# To the agent --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """A sign of life, which the agent answers."""

    sent: Seconds


@dataclass(frozen=True)
class Inspect:
    """Ask what a node is, has and reaches (launch/node/nodefacts.py says which fields ask for what)."""

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
    """Bind the store's port at this address, or at that of an interface or network (`iface`)."""

    attempt: Attempt
    bind: Name
    iface: Name = ""


@dataclass(frozen=True)
class Reach:
    """Try the way to the store and look for the run folder."""

    attempt: Attempt
    address: Name
    port: Port
    iface: Name
    run: Text
    nonce: Name


@dataclass(frozen=True)
class Start:
    """Start this node's ranks (launch/plan/plan.py makes it); `ranks` go to the rank parent as they are."""

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


@dataclass(frozen=True)
class Hold:
    """Have every rank wait before its next step."""

    attempt: Attempt


@dataclass(frozen=True)
class StopAt:
    """Have every rank save and end after so many steps."""

    attempt: Attempt
    steps: Count


@dataclass(frozen=True)
class Dump:
    """Send the Python stacks of all ranks."""

    attempt: Attempt


@dataclass(frozen=True)
class StopRanks:
    """End this node's ranks: TERM, KILL after the grace, then a sweep. Programs are told why."""

    attempt: Attempt
    grace_s: Seconds
    reason: Name = ""
    text: Text = ""


@dataclass(frozen=True)
class Bye:
    """The run is over, with this exit code."""

    code: ExitCode


ToAgent = Beat | Inspect | Prepare | Reach | Start | Hold | StopAt | Dump | StopRanks | Bye
TO_AGENT: Final = table(*get_args(ToAgent))
