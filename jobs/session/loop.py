"""The loop of a session: count steps, synchronize periodically, save, and stop all ranks after the same step.

    before a step    stop here if the agent has requested it
    a step           the program's own code
    synchronize      after the first step, then every MEET_S seconds, and when a save is due: all ranks exchange their
                     logged values, requests to save or stop, and the step of the next synchronization

Rank 0 alone chooses the step of the next synchronization, so all ranks synchronize after the same steps. An agent stops
its ranks through the page that it shares with them (`jobs/node/page.py`). Ranks without an agent stop at a
synchronization.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from muster.jobs.basics import exits
from muster.jobs.basics.errors import RefusedError
from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.node.reports import Reporter
from muster.jobs.saving.memory import memory_run, with_copies
from muster.jobs.saving.pace import Pace
from muster.jobs.saving.replay import Replay, logged_losses
from muster.jobs.saving.saver import NotSaving, Saver, Target
from muster.jobs.saving.schedule import SaveSchedule, failures_so_far
from muster.jobs.session.endings import SignalRequests
from muster.jobs.session.log import News, SessionLog
from muster.jobs.session.place import RankPlace
from muster.jobs.session.reading import Restored, room_for
from muster.jobs.session.starting import SessionStart, resume_line
from muster.jobs.session.together import OneRank

if TYPE_CHECKING:
    import torch

    from muster.jobs.session.sampler import Sampler
    from muster.jobs.session.state.state import State

MEET_S: Final = 0.5
PRINT_S: Final = 5.0  # minimum time between two lines on the terminal
MOST_STEPS: Final = 10_000  # maximum number of steps between two synchronizations of the ranks
STOP, NEXT, ROWS = 0, 1, slice(2, 4)  # indices of the first fields of a rank's note; the saver's fields follow


class Loop:
    """One rank's loop, from the first step of this attempt to the last."""

    def __init__(
        self, place: RankPlace, start: SessionStart, ranks: OneRank, log: SessionLog, reporter: Reporter
    ) -> None:
        self.place = place
        self.start = start
        self.ranks = ranks
        self.log = log
        self.reporter = reporter
        self.device: torch.device | None = None  # device of the state's tensors; None if the state has no tensors
        self.samplers: list[Sampler] = []
        self.progress: dict[str, int] = {}  # the position in an epoch, if the program counts epochs
        self.done = self.first = 0
        self.steps: int | None = None  # total number of steps, if the program sets it
        self.epochs: int | None = None
        self.has_begun = False
        self.in_step = True  # False between two steps, when logged values belong to no step
        self.stopped_with = 0  # the exit code after the ranks have agreed to stop, else 0
        self.log_every: int | None = None
        self.state: State | None = None
        self.saving: NotSaving = NotSaving()
        self.show: Callable[[News], None] = lambda news: None  # TensorBoard
        self.asked = SignalRequests()
        self._replay: Replay | None = None
        self._sound = True
        self._has_reported_first = False
        self._next = 0  # the step of the next synchronization
        self._met = 0  # the step of the last synchronization
        self._pace: Pace | None = None
        self._is_unsaved = False  # True: the state after the first steps is in the memory of the nodes only
        self._by_hand = False  # True if the program itself decides when to save
        self._began_s = self._met_s = self._said_s = 0.0

    @property
    def is_under_way(self) -> bool:
        """True from `begin` to the end of the loop."""
        return self._pace is not None

    # Beginning ------------------------------------------------------------------------------------------------------

    def begin(self, state: "State | None", restored: Restored) -> None:
        """Begin the loop, after the steps of the restored checkpoint if there is one: a collective."""
        self.state, self.has_begun = state, True
        self.done = self.first = restored.step
        self.progress = dict(restored.progress)
        if state is not None and self.place.saves:
            self._begin_saving(state)
        if restored.step and self.ranks.rank == 0:
            attempt = self.start.attempt
            self._replay = Replay(
                logged_losses(self.start.run.metrics, after=self.done, attempt=attempt), self.reporter
            )
        if not self.place.watched:
            self.asked.listen()
        self._began_s = time.monotonic()
        self._pace = Pace(timed=self.place.hang_s is not None)
        self._next = self.done + 1
        self._met, self._met_s = self.done, time.monotonic()

    def _begin_saving(self, state: "State") -> None:
        start, policy, resume = self.start, self.place.policy, self.start.resume
        elapsed_s, failures = failures_so_far(start.run)
        schedule = SaveSchedule(policy, self.done, elapsed_s=elapsed_s, failures=failures)
        parent = resume.checkpoint if resume is not None else None
        self._is_unsaved = resume is not None and resume.memory
        target = Target(start.run, start.attempt, None if self._is_unsaved else parent, self.done, parent)
        room = room_for(state, self.device)
        saver = Saver(target, policy, state.parts, room, self.ranks, schedule, self._describe, self.reporter)
        self.saving = with_copies(saver, memory_run() if self.place.watched else None)

    def _describe(self, done: int, parent: str | None, losses: Sequence[tuple[int, float]]) -> Mapping[str, Any]:
        """Return the metadata of a checkpoint."""
        assert self.state is not None
        return {
            "step": done,
            "steps": self.steps,
            "world_size": self.ranks.size,
            "mode": "session",
            "parent": parent,
            "losses": [each for each in losses if each[1] == each[1]],
            "saved": time.time(),
            "progress": self.progress,
            **self.state.meta(),
        }

    # A step ---------------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Begin a step, or stop the program if the agent has requested it."""
        assert self._pace is not None
        if self._pace.stops(self.done):
            self.stop(exits.STOPPED if self.state is None else exits.REQUEUE)
        self.in_step = True
        self._began_s = time.monotonic()

    def step_done(self) -> None:
        """Record the end of a step. This is a collective if the ranks synchronize after this step."""
        self._count(self.done + 1)
        if self.done in (self._next, self.steps) or self.saving.is_due(self.done):
            self.meet()
        self.saving.step_done(self.done, self.log.recent)
        self.in_step = False

    def save(self, step: int, *, wait: bool) -> None:
        """Save after `step` steps, for programs that count their own steps: a collective.

        Raises:
            RefusedError: if `step` is not larger than at the last call.
        """
        if step <= self.done:
            raise RefusedError(
                f"run.save: step must be larger than {self.done}, got {step}; pass the number of steps done so far"
            )
        if not self._by_hand and self.place.policy.memory_every_steps and self.ranks.rank == 0:
            print("checkpoint.memory_every_steps has no effect, because run.save decides when to save; use run.steps")
        self._by_hand = True
        self._count(step)
        self.saving.save(step, self.log.recent, wait=wait)
        self.meet()

    def _count(self, done: int) -> None:
        """Record that the first `done` steps are done."""
        assert self._pace is not None
        for sampler in self.samplers:
            sampler.advance(done - self.done)
        now, self.done = time.monotonic(), done
        self._pace.step_done(done)
        self.log.step_done(done, now - self._began_s)
        self._began_s = now
        if self.ranks.rank == 0 and not self._has_reported_first:
            self._has_reported_first = True
            self.reporter.first_step(done)

    def meet(self) -> None:
        """Exchange notes, write rows, agree whether to save, and stop if any rank was asked to stop: a collective."""
        asked, self.asked.save = self.asked.save, False
        if asked and self.ranks.rank == 0:
            self.start.run.ask_to_save("SIGUSR1")
        stop = self.asked.exit_code if self.asked.stop is not None else 0
        if self._by_hand and page.own.hold:
            page.own.held = self.done - 1  # so that the agent stops all ranks after this step
            stop = exits.REQUEUE
        rows = self.log.note()
        notes = self.ranks.exchange([float(stop), float(self._choose_next()), *rows, *self.saving.note(self.done)])
        self._next = int(notes[0][NEXT])
        news = self.log.report([note[ROWS] for note in notes], self.steps)
        self._sound = news.is_sound
        self.saving.hear(self.done, [note[ROWS.stop :] for note in notes], sound=self._sound)
        if self.ranks.rank == 0:
            self.show(news)
            self._say(news)
        if self._replay is not None and (text := self._replay.check(news.losses)):
            print(text, flush=True)
        if code := max(int(note[STOP]) for note in notes):
            self.stop(code)

    def _choose_next(self) -> int:
        """Propose the step of the next synchronization, from the recent speed. Rank 0's proposal is used."""
        now = time.monotonic()
        step_s = (now - self._met_s) / max(self.done - self._met, 1)
        self._met, self._met_s = self.done, now
        return self.done + min(max(1, round(MEET_S / max(step_s, 1e-6))), MOST_STEPS)

    def _say(self, news: News) -> None:
        """Report the newest step to the agent. Print a line every few seconds, or every `log_every` steps."""
        if not news.rows:
            return
        row, now = news.rows[-1], time.monotonic()
        values = {name: value for name, value in row.items() if name == "loss" or name in ("rate", "unit")}
        self.reporter.progress(step=row["step"], steps=self.steps, **values)
        shown = [each for each in news.rows if self.log_every and each["step"] % self.log_every == 0]
        if self.log_every is None and (now - self._said_s >= PRINT_S or row["step"] in (self.first + 1, self.steps)):
            shown = [row]
        for each in shown:
            self._said_s = now
            print(line_of(each), flush=True)

    # The end --------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the remaining rows and save the final state: a collective."""
        if self._pace is None:
            return
        if len(self.log):
            self.meet()
        self._close()

    def stop(self, code: int) -> NoReturn:
        """Save the state after this step, and end the program: a collective."""
        if len(self.log):
            rows = self.ranks.exchange(self.log.note())
            self.log.report(rows, self.steps)
        self._close()
        self.stopped_with = code
        if self.ranks.rank == 0:
            saved = "" if self.state is None else ", saved"
            print(f"stopped after step {self.done}{saved}", flush=True)
            if self.start.direct and self.state is not None:
                print(f"muster: to continue: {resume_line(self.start.run)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        raise SystemExit(code)

    def settle(self) -> None:
        """Wait for the save in flight if the program ends before its loop does. Not a collective."""
        if self._pace is None:
            return
        self.saving.settle()
        if not self._by_hand:
            print(
                f"muster: rank {self.ranks.rank}: the loop was left after step {self.done}, so its last state may not "
                "be saved; call run.save(state, step) before break, or let the loop end",
                file=sys.stderr,
            )

    def _close(self) -> None:
        self._pace = None
        self.asked.close()
        if self._sound and (self.done > self.first or self._is_unsaved):
            self.saving.finish(self.done, self.log.recent)
        elif self.ranks.rank == 0 and not self._sound:
            print(f"muster: the loss of step {self.done} is not finite, so this state was not saved", file=sys.stderr)
        page.own.enter(Phase.END)


def line_of(row: Mapping[str, Any]) -> str:
    """Format a row for the terminal."""
    of = f"/{row['steps']}" if "steps" in row else ""
    hidden = {"step", "steps", "attempt", "rank", "time", "step_s", "rate", "unit", "tokens", "samples"}
    values = [f"{name} {value:.6g}" for name, value in row.items() if name not in hidden and value is not None]
    return "  ".join([f"step {row['step']}{of}", *values, f"{row['rate']:,.3g} {row['unit']}"])
