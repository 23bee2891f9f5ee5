"""A snapshot of a run for `muster watch`, made by reading as little of the run folder as possible.

file                   read part    content
events.jsonl           new rows     the state, attempts, ranks that ended
progress.json          all          the phase of each rank, and the time since it was last heard from
metrics-RRRRR.jsonl    the end      step times and waiting: the shown ranks, and some others in turn
metrics.jsonl          the end      loss, rate
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import MusterError
from muster.jobs.checkpoint.interval import mean_time_between_failures, young_daly
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.schedule import GUESSED_STALL_S, failures_so_far
from muster.launch.common.fields import MOST_RANKS, real, typed_line
from muster.launch.common.follow import LineFollower
from muster.launch.look.stragglers import places_in
from muster.launch.look.watch.steps import SWEEP, AllSteps
from muster.launch.records.paces import PaceWatch
from muster.launch.records.progress_file import RunProgress, read_progress
from muster.launch.records.runrows import Rows, last_rows, read_ending
from muster.launch.records.runstate import DIRECT, RankState, RunState, read_state
from muster.launch.records.stragglers import stragglers_of, teams_of
from muster.launch.supervision.progress import FRESH_S

if TYPE_CHECKING:
    from muster.jobs.spec.failover import CheckpointSettings

MARKS: Final = ("failed", "suspended", "hang", "silent", "slow")  # worst first


@dataclass(frozen=True)
class RankSight:
    """The state of one rank; unknown values are None. `mark` is "" or in MARKS, `communication` a share of a step."""

    rank: int
    node: int | None
    host: str | None
    phase: str
    step: int | None
    seen_s: float | None  # seconds since the last heartbeat or other proof that it is alive
    step_s: float | None
    communication: float | None
    gpu_percent: int | None
    gpu_bytes: int | None
    mark: str


@dataclass(frozen=True)
class WatchedRun:
    """The state of a run at one moment. Unknown values are None. A failure now would lose `lost_steps`."""

    state: RunState
    why: str | None  # why the previous attempt ended
    step: int | None
    pace_s: float | None  # seconds from the end of one step to the end of the next
    left_s: float | None
    communication: float | None
    saves: bool | None  # whether the run saves checkpoints
    next_save: tuple[int, float] | None  # the step of the next save, and the seconds until then
    lost_steps: int | None
    ranks: tuple[RankSight, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record for JSON: that of `muster status --json`, extended by the fields of this class."""
        record = asdict(self)
        return self.state.to_json() | {name: each for name, each in record.items() if name != "state"}


class RunReader:
    """A reader that polls a run folder."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._rows = Rows()
        self._events = LineFollower(run.events, on_restart=lambda _: self._forget())
        self._attempt: int | None = None
        self._steps: AllSteps | None = None
        self._settings: CheckpointSettings | None = None
        self._paces: PaceWatch | None = None  # of a run without a supervisor
        self._knows_job = False
        self._failures = (0.0, 0)

    def look(self, shown: Collection[int] = (), sweep: int = SWEEP) -> WatchedRun:
        """Read new data. The steps of the `shown` ranks are always read, those of `sweep` other ranks in turn.

        Raises:
            MusterError: if the folder cannot be read.
        """
        state = read_state(self.run, self._read_rows)
        world_size = min(state.world_size or len(state.ranks), MOST_RANKS)
        if self._steps is None or state.attempt != self._attempt:
            self._attempt = state.attempt
            self._steps = AllSteps(self.run.attempt(state.attempt or 0))
            self._read_job(world_size, direct=state.transport == DIRECT)
        self._steps.look(world_size, shown, sweep)
        if self._paces is not None and not state.is_over:
            self._paces.look(sweep)
            state = replace(
                state, stragglers=tuple(stragglers_of(self._paces.found, self._paces.teams, places_in(state)))
            )
        progress = None if state.is_over else read_progress(self.run)
        if progress is not None and progress.attempt != state.attempt:
            progress = None
        ranks = self._ranks(state, progress)
        return self._watched(state, ranks)

    def _forget(self) -> None:
        self._rows = Rows()

    def _read_rows(self, _: RunDir) -> Rows:
        for line in self._events.poll():
            if row := typed_line(line):
                self._rows.take(row)
        return replace(self._rows)  # a copy, because the caller may change it

    def _read_job(self, world_size: int, *, direct: bool) -> None:
        """Read the checkpoint settings from the job and, without a supervisor, which ranks do the same work."""
        from muster.jobs.spec.expand import split_of
        from muster.jobs.spec.load import load_job
        from muster.jobs.spec.train import TrainSettings
        from muster.launch.common.kinds import KINDS

        self._settings, self._paces, self._failures = None, None, failures_so_far(self.run)
        try:
            job = load_job(self.run.job, KINDS, allow_unread=True).job
            self._settings, self._knows_job = job.checkpoint, True
            if direct and isinstance(job.settings, TrainSettings):
                teams = teams_of(split_of(job.settings, world_size))
                self._paces = PaceWatch(self.run.attempt(self._attempt or 0), teams)
        except MusterError:  # no job file, or the number of ranks does not fit it: shown as unknown
            pass

    def _ranks(self, state: RunState, progress: RunProgress | None) -> tuple[RankSight, ...]:
        assert self._steps is not None
        now, slow = time.time(), {rank for each in state.stragglers for rank in each.ranks}
        hangs = "hang" in self._rows.told
        sights = []
        for each in state.ranks:
            steps = self._steps.ranks.get(each.rank)
            last = steps.steps[-1] if steps is not None and steps.steps else None
            told = progress.ranks.get(each.rank) if progress is not None else None
            running = each.state == "running"
            seen_s = told.silent_s if told is not None else max(0.0, now - last.time) if last is not None else None
            reached = [place for place in (told and told.steps, last and last.number) if place]
            sights.append(
                RankSight(
                    rank=each.rank,
                    node=each.node,
                    host=each.host,
                    phase=told.phase if running and told is not None else each.state,
                    step=max(reached, default=None),
                    seen_s=seen_s if running else None,
                    step_s=steps.step_s if steps is not None else None,
                    communication=steps.communication if steps is not None else None,
                    gpu_percent=told.gpu_percent if told is not None else None,
                    gpu_bytes=told.gpu_bytes if told is not None else None,
                    mark=_mark(each, progress, hangs=hangs, slow=each.rank in slow),
                )
            )
        return tuple(sights)

    def _watched(self, state: RunState, ranks: tuple[RankSight, ...]) -> WatchedRun:
        assert self._steps is not None
        step = self._step(state, ranks)
        pace_s = self._steps.of(0).pace_s
        left_s = None
        if state.steps is not None and step is not None and pace_s is not None and not state.is_over:
            left_s = max(0, state.steps - step) * pace_s
        shares = [each.communication for each in ranks if each.communication is not None]
        kept = state.checkpoint.step if state.checkpoint is not None else 0
        copied = self._rows.told.get("copied", {})
        if copied.get("attempt") == state.attempt:  # a copy of an earlier attempt may be lost
            kept = max(kept, copied.get("step", 0))
        return WatchedRun(
            state=state,
            why=self._why(state),
            step=step,
            pace_s=pace_s,
            left_s=left_s,
            communication=fmean(shares) if shares else None,
            saves=True if state.checkpoint is not None else self._settings is not None if self._knows_job else None,
            next_save=None if state.is_over else self._next_save(state, step, pace_s),
            lost_steps=None if step is None or state.is_over else max(0, step - kept),
            ranks=ranks,
        )

    def _step(self, state: RunState, ranks: tuple[RankSight, ...]) -> int | None:
        """Return the last step that all ranks have finished, or the step at which the attempt began."""
        assert self._steps is not None
        told = [each.step for each in ranks if each.step is not None]
        if told and len(told) == len(ranks):
            return min(told)
        if state.restarts and not self._steps.of(0).steps:
            return self._rows.told.get("resuming", {}).get("step", 0)  # type: ignore[no-any-return]
        return state.step

    def _why(self, state: RunState) -> str | None:
        """Return why the previous attempt ended."""
        row = next(last_rows(self.run.attempts), {})
        if state.attempt is None or row.get("attempt", state.attempt) >= state.attempt:
            return None
        ending = read_ending(row.get("first"))
        return (ending.sentence() if ending is not None else str(row.get("message", ""))).partition("\n")[0] or None

    def _next_save(self, state: RunState, step: int | None, pace_s: float | None) -> tuple[int, float] | None:
        """Return the step after which the next checkpoint is due, and the seconds until then; None if unknown."""
        settings = self._settings
        if settings is None or step is None or not pace_s:
            return None
        last = state.steps or step + MOST_RANKS
        if settings.every_steps is not None:
            due = min(last, (step // settings.every_steps + 1) * settings.every_steps)
            return due, (due - step) * pace_s
        saved: Mapping[str, Any] = self._rows.told.get("saved", {})
        began = self._rows.attempt.get("time", 0.0)
        elapsed_s, failures = self._failures
        if isinstance(settings.every_s, int | float):
            interval_s = settings.every_s
        else:
            mtbf_s = mean_time_between_failures(elapsed_s + max(0.0, time.time() - began), failures)
            costs = {"step_s": pace_s, "save_s": real(saved.get("seconds")) or 0.0}
            interval_s = young_daly(real(saved.get("stall_s")) or GUESSED_STALL_S, mtbf_s, **costs)
        left_s = max(0.0, max(saved.get("time", 0.0), began) + interval_s - time.time())
        due = min(last, step + max(1, round(left_s / pace_s)))
        return due, (due - step) * pace_s


def _mark(rank: RankState, progress: RunProgress | None, *, hangs: bool, slow: bool) -> str:
    if rank.state == "failed":
        return "failed"
    if rank.state != "running":
        return ""
    told = progress.ranks.get(rank.rank) if progress is not None else None
    if told is not None and told.suspended:
        return "suspended"
    if hangs:
        return "hang"
    if progress is not None and rank.node is not None and progress.heard_s.get(rank.node, 0.0) > FRESH_S:
        return "silent"
    return "slow" if slow else ""
