"""Error messages for failed collectives. The messages name the bucket and the ranks that never entered its collective.

Wrappers wait within `waiting_for`. In a successful step, this only reads the clock once per bucket.

    rank 0   ... bucket 2 ─── waits until the group's timeout ────── writes "step 3, 3 buckets entered" ─┐
    rank 1   ... bucket 2 ─── waits, loses its connection to 0 ───── writes the same ────────────────────┤ the group's
    rank 2   ... bucket 1, and then nothing more                                                         │ store
    rank 0   reads for some seconds what the others wrote: all but rank 2 entered bucket 2 of step 3 <───┘

gloo ends a wait with an error after the timeout of the group (`init_process_group(timeout=...)`) and closes its
connections, which also ends the waits of other ranks. With NCCL no wait fails: its watchdog thread detects the timeout,
prints the sequence number, kind and size of the oldest unfinished collective, and aborts the process. The size
identifies the bucket; the flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE) shows which ranks did not enter. With
TORCH_NCCL_BLOCKING_WAIT=1 in the environment, the wait fails as with gloo, and the messages here apply.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Final, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from muster.ddp.checks import ranks_in_words

Answer = TypeVar("Answer")
LATER_S: Final = 5.0  # time for which a rank that timed out waits for the reports of other ranks
LOST_S: Final = 1.0  # the same wait after a lost connection; a rank whose timeout closed it has reported by then
STORE_S: Final = 2.0  # additional time for an answer of the store
AT_ONCE_S: Final = 0.2  # the limit for all of this, if a lost connection shall raise at once
POLL_S: Final = 0.05

TIMED_OUT: Final = re.compile(r"timed ?out|timeout", re.IGNORECASE)
GLOO_BOUND: Final = re.compile(r"waiting (\d+) ?ms")
LOST: Final = re.compile(r"connection|closed|reset by peer|broken pipe|read error|write error", re.IGNORECASE)


_is_at_once: ContextVar[bool] = ContextVar("_is_at_once", default=False)


@contextlib.contextmanager
def lost_at_once() -> Iterator[None]:
    """Within the block, a lost connection raises at once: this rank reports, but does not wait for other reports."""
    token = _is_at_once.set(True)
    try:
        yield
    finally:
        _is_at_once.reset(token)


def patience(limit_s: float) -> float:
    """Return the time to wait for reports of other ranks: `limit_s`, or none within `lost_at_once`."""
    return 0.0 if _is_at_once.get() else limit_s


class CollectiveTimeoutError(RuntimeError):
    """A collective did not end within the group's timeout. The message names the bucket and the missing ranks."""


@dataclass(frozen=True)
class Entered:
    """The collective that a rank waits for, and the rank's progress."""

    step: int  # number of synchronizations since this wrapper was built, including this one
    bucket: int  # number of the bucket, from 0, in the order of launches
    buckets: int
    launched: int  # number of buckets whose collective this rank has entered in this step
    first: str  # name of the first parameter
    last: str  # name of the last parameter
    bytes: int
    what: str = "bucket"


class waiting_for:
    """Context manager for waiting for a collective. If the wait raises an error, `explain` raises a clearer one.

    `entered` is a description of the collective, or a function that returns it and is called only after a failure.
    """

    __slots__ = ("_entered", "_group", "_since")

    def __init__(self, entered: Entered | Callable[[], Entered], process_group: dist.ProcessGroup | None) -> None:
        self._entered, self._group = entered, process_group

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            entered = self._entered if isinstance(self._entered, Entered) else self._entered()
            explain(error, entered, time.monotonic() - self._since, self._group)


@dataclass(frozen=True)
class _Report:
    """A rank's report to the other ranks after a failure."""

    step: int
    launched: int
    waited_s: float
    timed_out: bool

    def has_entered(self, entered: Entered) -> bool:
        """Return whether the rank with this report has entered the collective."""
        return (self.step, self.launched) > (entered.step, entered.bucket)


def explain(
    error: RuntimeError, entered: Entered, waited_s: float, process_group: dist.ProcessGroup | None
) -> NoReturn:
    """Explain a failed wait: raise an error with the bucket and, after a timeout, the ranks that did not enter.

    Reading the reports of other ranks takes up to a few seconds. A rank whose backward is still running has not noticed
    the failure yet. Such a rank is listed as not entered, even if its backend has already started the bucket.

    Raises:
        CollectiveTimeoutError: If the group's timeout passed on this rank, or on another rank that then closed the
        connection.
        RuntimeError: If the connection to a rank was lost, or the original error in any other case.
    """
    timed_out = bool(TIMED_OUT.search(str(error)))
    if not timed_out and not LOST.search(str(error)):
        raise error
    bound = GLOO_BOUND.search(str(error))  # gloo's timeout starts when its thread starts the collective
    waited_s = int(bound[1]) / 1e3 if bound else waited_s
    mine = _Report(entered.step, entered.launched, waited_s, timed_out)
    group = process_group or dist.group.WORLD
    assert group is not None  # this rank has just communicated, so it has a group
    received = _exchange_reports(mine, entered, group, LATER_S if timed_out else patience(LOST_S))
    reports = {rank: received.get(place) for place, rank in enumerate(dist.get_process_group_ranks(group))}
    who = f"rank {dist.get_rank()}: {_name(entered)}"
    if any(each.timed_out for each in received.values()):
        raise CollectiveTimeoutError(f"{who} {_why(entered, reports)}") from error
    silent = [rank for rank, each in reports.items() if each is None]
    missing = f"; no report from {ranks_in_words(silent)}" if silent else ""
    raise RuntimeError(f"{who} failed: a connection was lost{missing}: {error}") from error


def _name(entered: Entered) -> str:
    parameters = entered.first if entered.first == entered.last else f"{entered.first} ... {entered.last}"
    return (
        f"synchronization {entered.step}: {entered.what} {entered.bucket + 1} of {entered.buckets} "
        f"({parameters}; {entered.bytes / 2**20:.3g} MB)"
    )


def _why(entered: Entered, reports: dict[int, _Report | None]) -> str:
    """Name the ranks that did not enter or, if all entered in the end, those that timed out. Suggest a remedy."""
    timed_out = {rank: each.waited_s for rank, each in reports.items() if each and each.timed_out}
    waited = f"{max(timed_out.values()):.3g} s"
    absent = [rank for rank, each in reports.items() if each is None or not each.has_entered(entered)]
    if absent:
        return (
            f"did not end within {waited}; it was not entered by {ranks_in_words(absent)}: check what "
            f"{'this rank' if len(absent) == 1 else 'these ranks'} did instead, or give the group a longer timeout"
        )
    return (
        f"was entered by all ranks in the end, but {ranks_in_words(list(timed_out))} had timed out after {waited}: "
        "give the group a longer timeout, or check why the last rank was so late"
    )


def _exchange_reports(mine: _Report, entered: Entered, group: dist.ProcessGroup, listen_s: float) -> dict[int, _Report]:
    """Write this rank's report, and return the reports of the group's ranks, including this one.

    Return when all ranks have entered this collective, or after about `listen_s`, even if the store does not answer.
    """
    received = {group.rank(): mine}

    def exchange(store: Store) -> None:
        """Write the report, then read reports into `received` until all ranks have entered or the time is over."""
        deadline = time.monotonic() + listen_s
        absent = set(range(group.size())) - {group.rank()}
        store.set(str(group.rank()), json.dumps(asdict(mine)))
        while True:
            for place in [each for each in absent if store.check([str(each)])]:
                received[place] = _Report(**json.loads(store.get(str(place))))
                if received[place].has_entered(entered):
                    absent.discard(place)
            if not absent or time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    ask_store(group, "ddp/timeouts", exchange, listen_s + STORE_S if listen_s else AT_ONCE_S)
    return dict(received)  # incomplete if the rank that hosts the store was lost


def ask_store(group: dist.ProcessGroup, prefix: str, ask: Callable[[Store], Answer], limit_s: float) -> Answer | None:
    """Query a group's store on a separate thread. If the rank that hosts the store is lost, the store's own timeouts
    take minutes.

    Returns None if there was no answer in time, or the store is lost.
    """
    answers: list[Answer] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask(PrefixStore(prefix, group.get_group_store())))

    asking = Thread(target=run, daemon=True)
    asking.start()
    asking.join(limit_s)
    return answers[0] if answers else None
