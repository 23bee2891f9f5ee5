"""What a rank says when a collective of a wrapper fails: which bucket it was, and which ranks never came to it.

A step in which nothing fails pays one reading of the clock for each bucket: `waiting_for` is where a wrapper waits.

    rank 0   ... bucket 2 ─── waits, its group's time-out passes ─── writes "step 3, 3 buckets entered" ─┐
    rank 1   ... bucket 2 ─── waits, loses its connection to 0 ───── writes the same ────────────────────┤ the group's
    rank 2   ... bucket 1, and is heard of no more                                                       │ store
    rank 0   reads what the others wrote for some seconds: all but rank 2 came to bucket 2 of step 3 <───┘

gloo ends a wait with an error after the time-out of the group (`init_process_group(timeout=...)`) and closes its
connections, which ends the others' waits too. With NCCL no wait fails: its watchdog notices on a thread of its own,
writes the sequence number, kind and size of the oldest collective that did not end, and aborts the process. The size
tells the bucket; who did not come is in what the flight recorder keeps (TORCH_NCCL_TRACE_BUFFER_SIZE). Where the
environment says TORCH_NCCL_BLOCKING_WAIT=1 the wait fails as with gloo, and so does what is said here.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Final, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from muster.ddp.checks import ranks_in_words

Answer = TypeVar("Answer")
LATER_S: Final = 5.0  # how long a rank that timed out listens for others, which may time out that much later
LOST_S: Final = 1.0  # the same after a lost connection: whoever closed it by timing out has said so by then
STORE_S: Final = 2.0  # how much longer the store itself may take
POLL_S: Final = 0.05

TIMED_OUT: Final = re.compile(r"timed ?out|timeout", re.IGNORECASE)
GLOO_BOUND: Final = re.compile(r"waiting (\d+) ?ms")
LOST: Final = re.compile(r"connection|closed|reset by peer|broken pipe|read error|write error", re.IGNORECASE)


class CollectiveTimeoutError(RuntimeError):
    """A collective did not end in the time its group allows; the message names the bucket and who did not come."""


@dataclass(frozen=True)
class Entered:
    """The collective that a rank waits for, and how far it is."""

    step: int  # synchronizations of this wrapper so far, this one included
    bucket: int  # from 0, in the order of launches
    buckets: int
    launched: int  # buckets whose collective this rank has entered in this step
    first: str  # parameter
    last: str  # parameter
    bytes: int
    what: str = "bucket"


class waiting_for:
    """Within it a rank waits for a collective of a group: what that raises is told by `tell`.

    Which collective that is, is given or asked for; asked only after a failure.
    """

    __slots__ = ("_entered", "_group", "_since")

    def __init__(self, entered: Entered | Callable[[], Entered], process_group: dist.ProcessGroup | None) -> None:
        self._entered, self._group = entered, process_group

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            entered = self._entered if isinstance(self._entered, Entered) else self._entered()
            tell(error, entered, time.monotonic() - self._since, self._group)


@dataclass(frozen=True)
class _Said:
    """What a rank writes for the others after a failure."""

    step: int
    launched: int
    waited_s: float
    timed_out: bool

    def came_to(self, entered: Entered) -> bool:
        """True if that rank entered this collective, or is past it."""
        return (self.step, self.launched) > (entered.step, entered.bucket)


def tell(error: RuntimeError, entered: Entered, waited_s: float, process_group: dist.ProcessGroup | None) -> NoReturn:
    """Raise what a failed wait means, from it: name the bucket and, if it was a time-out, the ranks that did not enter.

    Takes up to some seconds, while it listens what the other ranks say. A rank whose backward is still running has not
    noticed yet, and is named among those that did not enter even if the backend has its bucket already.

    Raises:
        CollectiveTimeoutError: the time-out of the group passed here, or on a rank that then closed the connection.
        RuntimeError: the connection to a rank was lost; or the error itself, if it is neither.
    """
    timed_out = bool(TIMED_OUT.search(str(error)))
    if not timed_out and not LOST.search(str(error)):
        raise error
    bound = GLOO_BOUND.search(str(error))  # gloo counts from when its thread took the collective up
    waited_s = int(bound[1]) / 1e3 if bound else waited_s
    mine = _Said(entered.step, entered.launched, waited_s, timed_out)
    group = process_group or dist.group.WORLD
    assert group is not None  # it has just communicated
    heard = _hear(mine, entered, group, LATER_S if timed_out else LOST_S)
    said = {rank: heard.get(place) for place, rank in enumerate(dist.get_process_group_ranks(group))}
    who = f"rank {dist.get_rank()}: {_name(entered)}"
    if any(each.timed_out for each in heard.values()):
        raise CollectiveTimeoutError(f"{who} {_why(entered, said)}") from error
    silent = [rank for rank, each in said.items() if each is None]
    word = f"; no word from {ranks_in_words(silent)}" if silent else ""
    raise RuntimeError(f"{who} failed: a connection was lost{word}: {error}") from error


def _name(entered: Entered) -> str:
    parameters = entered.first if entered.first == entered.last else f"{entered.first} ... {entered.last}"
    return (
        f"step {entered.step}: {entered.what} {entered.bucket + 1} of {entered.buckets} "
        f"({parameters}; {entered.bytes / 2**20:.3g} MB)"
    )


def _why(entered: Entered, said: dict[int, _Said | None]) -> str:
    """Say who did not come and what to do; or, if all did, who gave up before."""
    timed_out = {rank: each.waited_s for rank, each in said.items() if each and each.timed_out}
    waited = f"{max(timed_out.values()):.3g} s"
    absent = [rank for rank, each in said.items() if each is None or not each.came_to(entered)]
    if absent:
        return (
            f"did not end within {waited}; it was not entered by {ranks_in_words(absent)}: see what "
            f"{'it was' if len(absent) == 1 else 'they were'} doing instead; if they are only slow, give the group "
            "a longer timeout"
        )
    return (
        f"was entered by all ranks in the end, but {ranks_in_words(list(timed_out))} had given up after {waited}: "
        "give the group a longer timeout, or see why the last came so late"
    )


def _hear(mine: _Said, entered: Entered, group: dist.ProcessGroup, listen_s: float) -> dict[int, _Said]:
    """Say what this rank knows, and return what the ranks of the group said, this one included.

    Ends when all came to this collective, or after `listen_s`, whatever happens to the store.
    """
    heard = {group.rank(): mine}

    def exchange(store: Store) -> None:
        """Write, then read until all have come or the time is over; fill `heard`."""
        deadline = time.monotonic() + listen_s
        absent = set(range(group.size())) - {group.rank()}
        store.set(str(group.rank()), json.dumps(asdict(mine)))
        while True:
            for place in [each for each in absent if store.check([str(each)])]:
                heard[place] = _Said(**json.loads(store.get(str(place))))
                if heard[place].came_to(entered):
                    absent.discard(place)
            if not absent or time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    ask_store(group, "ddp/timeouts", exchange, listen_s + STORE_S)
    return dict(heard)  # of what was heard so far if the store went with its rank


def ask_store(group: dist.ProcessGroup, prefix: str, ask: Callable[[Store], Answer], limit_s: float) -> Answer | None:
    """Ask a group's store, on a thread of its own: where it went with its rank, its time-outs are minutes.

    None: there was no answer in time, or the store is gone.
    """
    answers: list[Answer] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask(PrefixStore(prefix, group.get_group_store())))

    asking = Thread(target=run, daemon=True)
    asking.start()
    asking.join(limit_s)
    return answers[0] if answers else None
