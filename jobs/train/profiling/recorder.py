"""Record a few steps of one rank with PyTorch's profiler, and write the profile. If off, this costs one attribute read.

    steps   1 2 3 4   5         6 7 8      9
            .         warm up   record     the profile is written after step 8, then the profiler is off

While steps are recorded, the training's clock passes its marks to the profiler, so that the trace has steps and phases.
Errors of the profiler are reported but never end training.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.runfolder.profiledir import ProfileDir
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.trace.events import MARK, START
from muster.jobs.trace.memory import HeldStorage
from muster.jobs.trace.record import numbers
from muster.jobs.trace.window import ProfileWindow, window_of
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.train.profiling.marking import Marks, Subject
from muster.jobs.train.profiling.memory import AllocatorHistory, QuietLog, listed
from muster.jobs.train.profiling.writing import write_profile

if TYPE_CHECKING:
    from typing_extensions import Self

    from muster.jobs.spec.profile import ProfileSettings


class NotProfiling:
    """A profiler that is off. It defines the interface of `ProfileRecorder`."""

    word: str | None = None  # the `profile` column in the metrics of the current step

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def step_done(self, done: int) -> None:
        """Handle the end of a step; `done` steps are completed."""

    @property
    def summary(self) -> str | None:
        """The line to print at the end of a run, or None."""
        return None


QUIET: Final = ("KINETO_LOG_LEVEL", "6")  # environment variable without which Kineto writes two lines to standard error
NOT_PROFILING: Final = NotProfiling()
WARM_UP, RECORDED, WRITTEN = "warm-up", "recorded", "written"


class ProfileRecorder(NotProfiling):
    """A profiler that records the steps of a window."""

    def __init__(
        self,
        settings: "ProfileSettings",
        folder: ProfileDir,
        clock: StepMarks,
        device: torch.device,
        facts: Mapping[str, Any],
        *,
        subject: Subject,
        done: int,
        steps: int,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.clock = clock
        self.device = device
        self.facts = {**facts, "steps_of_job": steps}
        if subject.note:
            self.facts["modules_note"] = subject.note
        self.subject = subject
        self.marks: Marks | None = None
        self.quiet = QuietLog()
        self.before: list[HeldStorage] = []
        self.window: ProfileWindow = window_of(settings, done=done, steps=steps)
        self.done = done
        self.history = AllocatorHistory(device) if device.type == "cuda" and settings.memory else None
        self.profiler: profile | None = None
        self.record: dict[str, Any] | None = None
        self.said = self.window.note

    def __enter__(self) -> "Self":
        self._guarded(self._move_on)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.profiler is not None and kind is None and self.done >= self.window.first:  # stopped within the window
            self._guarded(self._finish)
        if self.record is None and not self.said:
            self.said = f"not profiled: stopped before step {self.window.first} was done"
        self._drop()

    def step_done(self, done: int) -> None:
        """Prepare for the next step: nothing, a warm-up, a recorded step, or the end of the recording."""
        self.done = done
        if self.word is not None or done + 1 >= self.window.first - 1:
            self._guarded(self._move_on)

    @property
    def summary(self) -> str | None:
        """The line to print at the end of a run: the profile's path, or why there is no profile."""
        return self.said or None

    def _move_on(self) -> None:
        following = self.done + 1
        if self.window.count and self.profiler is None and following in (self.window.first - 1, self.window.first):
            self._start(warm=following < self.window.first)
        elif self.profiler is not None and self.done >= self.window.last:
            self._finish()
            self.word = WRITTEN
            return
        elif self.profiler is not None:
            self.profiler.step()
        recording = self.profiler is not None and following >= self.window.first
        if recording and following == self.window.first:
            self._start_marking()
        self.word = None if self.profiler is None else RECORDED if recording else WARM_UP
        self.clock.listener = self._mark if recording else None

    def _start(self, *, warm: bool) -> None:
        begins = 1 if warm else 0

        def action(step: int) -> ProfilerAction:
            return ProfilerAction.RECORD if step >= begins else ProfilerAction.WARMUP

        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault(*QUIET)
        self.profiler = profile(
            activities=activities,
            schedule=action,
            with_stack=self.settings.stacks,
            profile_memory=self.settings.memory,
        )
        if self.history is not None:
            self.history.start()
        self.profiler.start()

    def _start_marking(self) -> None:
        """Start marking modules and listing memory, which only recorded steps need."""
        if not self.subject.note:
            self.marks = Marks(self.subject)
            self.marks.start()
        if self.settings.memory:
            self.quiet.start()
            self.before = listed(self.subject.held())

    def _stop_marking(self) -> None:
        """End what `_start_marking` started. Does nothing if not started."""
        if self.marks is not None:
            self.marks.stop()
        self.quiet.stop()

    def _mark(self, text: str) -> None:
        number = f" {self.done + 1}" if text == START else ""
        with record_function(f"{MARK}{text}{number}"):
            pass

    def _finish(self) -> None:
        """Stop recording and write the profile. This may take longer than a step, while other ranks wait."""
        profiler, self.profiler, self.clock.listener = self.profiler, None, None
        assert profiler is not None
        page.own.enter(Phase.SAVE)
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            held = (self.before, listed(self.subject.held())) if self.settings.memory else ([], [])
            profiler.stop()
            self.record = write_profile(self.folder, profiler, self.history, held, self.device, self.facts)
            self.said = "; ".join(filter(None, (self._summary_of(self.record), self.window.note)))
        finally:
            self._stop_marking()
            if self.history is not None:
                self.history.stop()
            page.own.enter(Phase.RUN)

    def _summary_of(self, record: Mapping[str, Any]) -> str:
        steps = numbers([step["step"] for step in record["steps"]])
        ratio = record["overlap"]
        hidden = "" if ratio is None else f", {ratio:.0%} of rank {record['rank']}'s communication hidden"
        shows = RunDir(self.folder.path.parent.parent).command("profile")
        return f"profiled {steps}{hidden}: {self.folder.path.parent}/profile-*/; to view: {shows}"

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work`. If it fails, warn and stop profiling, so that training continues."""
        try:
            work()
        except Exception as failure:
            self._drop()
            self.window = ProfileWindow(self.done + 1, self.done)
            self.word, self.said = None, f"not profiled: {type(failure).__name__}: {failure}"
            with suppress(OSError):
                print(f"muster: warning: rank {self.facts['rank']}: {self.said}", file=sys.stderr, flush=True)

    def _drop(self) -> None:
        """Stop recording and discard the recorded steps."""
        profiler, self.profiler, self.clock.listener = self.profiler, None, None
        with suppress(RuntimeError):
            if profiler is not None:
                profiler.stop()
        self._stop_marking()
        if self.history is not None:
            self.history.stop()


def prepare(settings: "ProfileSettings", *, cuda_graph: bool) -> None:
    """Load CUPTI before the process records a CUDA graph, and keep it loaded, so that replays can be profiled."""
    if settings.on and cuda_graph and torch.cuda.is_available():
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            torch.cuda.synchronize()
