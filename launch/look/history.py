"""The attempts of a run, one record each: its steps, what ended it, and the time and steps lost by its end.

    rows of attempts.jsonl   one per attempt whose end a supervisor recorded
    rows of events.jsonl     attempts that still run or lost their supervisor; and the times when a supervisor ran

    attempt 0 ──failed─ detect ─ stop ─ wait ─ start ─ load ─ replay ──→ the step that attempt 0 had reached
                        └ row of attempt 0 ──┘       └ row of attempt 1 ┘  all of it is the cost of attempt 0's end

The effective training time ratio (ETTR) is the time of useful steps, each counted once, divided by the time in which a
supervisor ran. Neither includes waiting in a queue or for a user to resume the run.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.event_rows import typed_lines
from muster.launch.common.fields import MOST_ATTEMPTS, real
from muster.launch.records.runrows import IN_MEMORY, LIVING, first_and_last_step
from muster.launch.records.runstate import DIRECT, RunState
from muster.launch.records.verdict import RankEnd

OF_END: Final[tuple[str, ...]] = ("detect_s", "stop_s")  # delays recorded by the attempt that ended
OF_BEGINNING: Final[tuple[str, ...]] = ("start_s", "load_s", "replay_s")  # delays recorded by the following attempt
PARTS: Final = ("detect_s", "stop_s", "wait_s", *OF_BEGINNING)
ON_PURPOSE: Final = ("stopped", "requeue")
SUPERVISOR_LOST: Final = "its supervisor was gone"
UNSEEN: Final = "rank 0 ended without recording how"


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt. Steps are counts of finished steps, times are unix seconds, and unknown values are None.

    `lost_steps` is the number of finished steps that the next attempt had to repeat. `lost_s` is the time lost because
    the attempt ended early: seconds of each phase from its end until the next attempt trains. `idle_s` is the time
    until the next supervisor started.
    """

    attempt: int
    started: float | None
    ended: float | None = None
    class_name: str | None = None
    code: int | None = None
    cause: str = ""
    culprit: str | None = None
    mode: str | None = None
    world_size: int | None = None
    hosts: tuple[str, ...] = ()
    origin: str | None = None
    from_step: int = 0
    last_step: int | None = None
    saved_step: int | None = None
    lost_steps: int = 0
    lost_s: Mapping[str, float] = field(default_factory=dict)
    idle_s: float | None = None
    decided: str = ""
    compared: int | None = None  # repeated steps whose losses were compared with the logged ones
    worst: float | None = None  # largest relative difference of these losses

    @property
    def cut_short(self) -> bool:
        """True if the attempt ended before its work was done, on purpose or not."""
        return self.ended is not None and self.code != 0

    @property
    def failed(self) -> bool:
        """True if the attempt was cut short, but not on purpose."""
        return self.cut_short and self.class_name not in ON_PURPOSE


@dataclass(frozen=True)
class AttemptHistory:
    """All attempts of a run, oldest first, with totals."""

    attempts: tuple[AttemptRecord, ...]
    lost_steps: int
    lost_s: float
    supervised_s: float
    ettr: float | None  # None if no step is recorded
    shares: Mapping[str, float] = field(default_factory=dict)  # of the supervised time, by kind; empty if unknown


@dataclass
class _Told:
    """The rows of events.jsonl about one attempt; `span` is the index of its supervisor, from 0."""

    row: dict[str, Any]
    span: int
    in_place: bool = False  # it began with ranks of the attempt before
    resuming: dict[str, Any] = field(default_factory=dict)
    regrouped: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    replayed: dict[str, Any] = field(default_factory=dict)
    stalls_s: float = 0.0
    last_time: float = 0.0
    judged: bool = False


class EventsOfAttempts:
    """The rows of events.jsonl, grouped by attempt, and the first and last time of each supervisor."""

    def __init__(self) -> None:
        self.told: dict[int, _Told] = {}
        self.spans: list[list[float]] = []
        self._submitted = 0.0
        self._ahead: dict[int, dict[str, Any]] = {}
        self._in_place: set[int] = set()

    def take(self, row: dict[str, Any]) -> None:
        """Process the next row."""
        now, attempt, event = row.get("time", 0.0), row.get("attempt"), row.get("event")
        if event == "submitted":
            self._submitted = now
        elif event == "resuming" and attempt is not None:
            self._ahead[attempt] = row
        elif event == "restarting" and attempt is not None and row.get("in_place"):
            self._in_place.add(attempt)
        elif event == "attempt" and attempt is not None:
            if (self._submitted or not self.spans) and len(self.spans) < MOST_ATTEMPTS:
                self.spans.append([self._submitted or now, now])
            self._submitted = 0.0
            ahead, in_place = self._ahead.get(attempt, {}), attempt in self._in_place
            self.told[attempt] = _Told(row, len(self.spans) - 1, in_place, ahead)
        elif (event == "attempt_ended" and attempt is not None and attempt not in self.told) and (
            self.spans and not self._submitted
        ):  # no `attempt` row, because some node never connected
            self.told[attempt] = _Told(row, len(self.spans) - 1, resuming=self._ahead.get(attempt, {}))
        if self._submitted or attempt not in self.told or (event == "ended" and not self.told[attempt].judged):
            return  # skip the rows of a queued run, and the last row of a lost run, which another process wrote
        self.spans[self.told[attempt].span][1] = self.told[attempt].last_time = now
        self.told[attempt].judged |= event == "attempt_ended"
        if event == "saved":
            self.told[attempt].saved = row
            self.told[attempt].stalls_s += real(row.get("stall_s")) or 0.0
        elif event in ("replayed", "regrouped"):
            setattr(self.told[attempt], event, row)


def read_history(run: RunDir, state: RunState, events: EventsOfAttempts | None = None) -> AttemptHistory:
    """Read the attempts of a run; `state` is its current state. `events`: the rows of events.jsonl, if already read."""
    if events is None:
        events = EventsOfAttempts()
        for row in typed_lines(run.events):
            events.take(row)
    told, spans = events.told, events.spans
    rows = {row["attempt"]: row for row in typed_lines(run.attempts) if "attempt" in row}
    newest = max({*told, *rows}, default=None)
    lost = UNSEEN if state.transport == DIRECT else SUPERVISOR_LOST
    records: list[AttemptRecord] = []
    for attempt in sorted({*told, *rows}):
        record = _of_row(rows[attempt]) if attempt in rows else _of_events(run, attempt, told[attempt], records)
        if attempt not in rows and (attempt != newest or state.is_over):
            ended = _last_sign(run, attempt, told[attempt])
            record = replace(record, ended=ended, class_name="lost", code=None, cause=lost)
            span = spans[told[attempt].span]
            span[1] = max(span[1], ended)
        again = told[attempt].replayed if attempt in told else {}
        records.append(replace(record, compared=again.get("compared"), worst=again.get("worst")))
    records = _with_prices(records, rows, {attempt: each.span for attempt, each in told.items()})
    until = time.time() if not state.is_over else None
    supervised_s = sum((end if end is not None else until or begin) - begin for begin, end in _closed(spans, until))
    useful_s = _useful_s(run, records, done=state.state == "done", goes_on=not state.is_over)
    stalls_s = sum(each.stalls_s for each in told.values())
    return AttemptHistory(
        attempts=tuple(records),
        shares=_shares(records, useful_s, stalls_s, supervised_s),
        lost_steps=sum(each.lost_steps for each in records),
        lost_s=sum(sum(each.lost_s.values()) for each in records),
        supervised_s=supervised_s,
        ettr=min(1.0, useful_s / supervised_s) if useful_s and supervised_s > 0 else None,
    )


def _shares(
    records: Sequence[AttemptRecord], useful_s: float, stalls_s: float, supervised_s: float
) -> dict[str, float]:
    """Divide the supervised time into useful steps, stalls of saves, lost steps, the phases of restarts, and the rest.

    `other` is the time of the first start, of the end, and of steps whose time is unknown.
    """
    if not useful_s or supervised_s <= 0:
        return {}
    lost = {part: sum(record.lost_s.get(part, 0.0) for record in records) for part in PARTS}
    steps_s = min(useful_s, supervised_s)
    spent = {"useful": max(steps_s - stalls_s, 0.0), "stalls": min(stalls_s, steps_s), "lost_steps": lost["replay_s"]}
    spent |= {part.removesuffix("_s"): lost[part] for part in PARTS if part != "replay_s"}
    shares = {kind: seconds / supervised_s for kind, seconds in spent.items()}
    return {**shares, "other": max(1.0 - sum(shares.values()), 0.0)}


def _last_sign(run: RunDir, attempt: int, told: _Told) -> float:
    """Return the time of the last recorded activity of an attempt without a recorded end."""
    _, newest = first_and_last_step(run, attempt)
    return max(told.last_time, float(newest.get("time", 0.0)))


def _closed(spans: Sequence[Sequence[float]], until: float | None) -> list[tuple[float, float | None]]:
    """Return the spans; the last one has no end (None) if the run still continues."""
    found: list[tuple[float, float | None]] = [(begin, end) for begin, end in spans]
    return [*found[:-1], (found[-1][0], None)] if found and until is not None else found


def _of_row(row: Mapping[str, Any]) -> AttemptRecord:
    first = row.get("first", {})
    rank, node, host = first.get("rank"), first.get("node", 0), first.get("host", "?")
    return AttemptRecord(
        attempt=row["attempt"],
        started=row.get("started"),
        ended=row.get("ended"),
        class_name=row.get("class"),
        code=row.get("code"),
        cause=row.get("cause") or row.get("message", ""),
        culprit=RankEnd(rank, node, host, None, None, 0.0, "own").where() if first else None,
        mode=row.get("mode"),
        world_size=row.get("world_size"),
        hosts=tuple(row.get("hosts", ())),
        origin=row.get("from"),
        from_step=row.get("from_step", 0),
        last_step=row.get("last_step"),
        saved_step=row.get("saved_step"),
        lost_steps=row.get("lost_steps", 0),
        decided=row.get("next", ""),
    )


def _of_events(run: RunDir, attempt: int, told: _Told, before: Sequence[AttemptRecord]) -> AttemptRecord:
    """Build the record of an attempt that has no row in attempts.jsonl. `before`: the earlier ones."""
    _, newest = first_and_last_step(run, attempt)
    living = told.in_place and not told.resuming and bool(before)
    done = before[-1].last_step if living else None  # the state that living ranks have, until they report it
    from_step = told.regrouped.get("step") or told.resuming.get("step") or done or 0
    saved, origin = told.saved.get("step"), told.resuming.get("checkpoint")
    if origin and told.resuming.get("memory") is True:
        origin += IN_MEMORY
    last = max((step for step in (newest.get("step"), saved, done) if step is not None), default=None)
    return AttemptRecord(
        attempt=attempt,
        started=told.row.get("time"),
        world_size=told.row.get("world_size"),
        hosts=tuple(told.row.get("hosts", ())),
        origin=LIVING if told.regrouped or living else origin,
        from_step=from_step,
        last_step=last,
        saved_step=saved,
        lost_steps=0 if last is None else max(0, last - (from_step if saved is None else saved)),
    )


def _with_prices(
    records: list[AttemptRecord], rows: Mapping[int, Mapping[str, Any]], spans: Mapping[int, int]
) -> list[AttemptRecord]:
    """Add the lost time and steps to each attempt that was cut short."""
    priced = []
    for record, following in zip(records, [*records[1:], None], strict=False):
        if not record.cut_short:
            priced.append(replace(record, lost_steps=0))
            continue
        own, after = _times(rows.get(record.attempt)), _times(rows.get(following.attempt) if following else None)
        lost = {part: own[part] for part in OF_END if part in own}
        idle_s = None
        lost_steps = record.lost_steps
        if following is not None:
            if record.ended is not None and following.started is not None:
                gap_s = max(0.0, following.started - record.ended)
                if spans.get(record.attempt) == spans.get(following.attempt):
                    lost["wait_s"] = round(gap_s, 3)
                else:
                    idle_s = gap_s
            lost |= {part: after[part] for part in OF_BEGINNING if part in after}
            if record.last_step is not None:
                lost_steps = max(0, record.last_step - following.from_step)
        priced.append(replace(record, lost_s=lost, idle_s=idle_s, lost_steps=lost_steps))
    return priced


def _times(row: Mapping[str, Any] | None) -> dict[str, float]:
    times: dict[str, float] = (row or {}).get("times", {})
    return times


def _useful_s(run: RunDir, records: Sequence[AttemptRecord], *, done: bool, goes_on: bool) -> float:
    """Return the time of all useful steps, each counted once, at the mean step time of the attempt that did them.

    Attempts are visited newest first: steps beyond the one where the next attempt began do not count.
    """
    total_s, limit = 0.0, float("inf")
    for index, record in reversed(list(enumerate(records))):
        last, newest = record.last_step, index == len(records) - 1
        if newest and not done and not goes_on:  # count saved steps only
            last = record.saved_step if record.saved_step is not None else record.from_step
        if last is None:
            _, last_row = first_and_last_step(run, record.attempt)
            last = last_row.get("step", record.from_step)
        kept = max(0.0, min(last, limit) - record.from_step)
        total_s += kept * _step_s(run, record.attempt) if kept else 0.0
        if newest and done and kept:  # also count the last evaluation and save
            _, last_row = first_and_last_step(run, record.attempt)
            total_s += max(0.0, (record.ended or 0.0) - last_row.get("time", record.ended or 0.0))
        limit = min(limit, record.from_step)
    return total_s


def _step_s(run: RunDir, attempt: int) -> float:
    """Return the mean seconds per step of an attempt, including saves and evaluations between steps."""
    first, last = first_and_last_step(run, attempt)
    steps = last.get("step", 0) - first.get("step", 0)
    seconds = last.get("time", 0.0) - first.get("time", 0.0)
    return max(0.0, seconds / steps) if steps > 0 else 0.0
