"""The launch manager of a `timing:` job: it forks a process for each launch of each row, and writes the results.

    survey ── header, peaks ── launch 1: row · row · ... ── launch 2: row · row · ... ── end
                                         └ fork · build the model · warm up · steps · peak memory

It runs no torch operation itself, so every fork starts fresh, without warm caches or memory from other rows. The
launches of a row are spread over the run, so a drift of the machine affects all rows equally. A launch that exceeds its
time is killed, and its completed steps are kept. A row whose launch failed gets no other launch.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from muster.jobs.basics.rowlog import RowLog
from muster.jobs.basics.words import counted
from muster.jobs.machine import load
from muster.jobs.machine.free import host_bytes
from muster.jobs.machine.hardware import cpu_name
from muster.jobs.measuring.recorded import End
from muster.jobs.models.anatomy import anatomy
from muster.jobs.node.page import Page
from muster.jobs.spec.strict import Strict
from muster.jobs.timing.records import Dtypes, Header, Launch, LayerTypes, Machine, Peak, State, Timed, TimingSummary
from muster.jobs.timing.settings import Case, TimingSettings
from muster.jobs.train.timing import memory, work
from muster.jobs.train.timing.work import TimingTask
from muster.jobs.world.forked import Ended, Forked, Tell

SURVEY_S: Final = 60.0
POLL_S: Final = 0.5
DIGITS: Final = 9  # number of decimals of seconds
KILLED: Final = "was killed by SIGKILL"

Heard = list[dict[str, Any]]


class ModelTimer:
    """The measurement of all rows of a job on one device."""

    def __init__(self, settings: TimingSettings, device: torch.device, log: RowLog, *, name: str) -> None:
        self.settings = settings
        self.device = device
        self.name = name
        self.rows: dict[Case, Timed] = {}
        self.rates: dict[str, float] = {}
        self.own: dict[str, Any] = {}  # the survey's results for the model of `train`
        self._log = log

    def run(self) -> None:
        """Survey the machine, then measure. Each record is written at once."""
        began = time.monotonic()
        self._survey()
        for case in self.settings.cases() if self.settings.dtypes else ():
            self._find_types(case)
        for case in () if self.settings.dtypes else self.settings.cases() * self.settings.launches:
            if case not in self.rows or self.rows[case].state == "ok":
                self._launch(case)
        self._write(End(seconds=round(time.monotonic() - began, 3), time=time.time()))

    def _write(self, record: Strict) -> None:
        self._log.append([record.model_dump(mode="json")])

    def _survey(self) -> None:
        heard, _ = listen(lambda tell, page: work.survey(self.settings, self.device, tell), SURVEY_S)
        told = merged(heard)
        self.own = told.get("own", {})
        machine = Machine(
            host=socket.gethostname(),
            cpu=cpu_name(),
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            memory_bytes=host_bytes("MemTotal"),
            gpu=told.get("gpu", ""),
        )
        header = Header(
            name=self.name,
            device="cuda" if self.device.type == "cuda" else "cpu",
            machine=machine,
            torch=torch.__version__,
            settings=self.settings,
            time=time.time(),
        )
        self._write(header)
        for precision, side, rate in (message["rate"] for message in heard if "rate" in message):
            self.rates[precision] = rate
            self._write(Peak(precision=precision, side=side, flops_per_s=rate))

    def _launch(self, case: Case) -> None:
        """Run one launch of a row, unless the row needs too much memory, and write the row."""
        allowed = memory.allowed_bytes(self.settings.memory_share)
        if self.device.type == "cpu" and not case.is_own:
            why = memory.refusal(
                anatomy(self.settings.shape(case)),
                self.settings.batch,
                pass_name=case.pass_name,
                precision=case.precision,
                recompute=self.settings.activation_checkpointing,
                allowed=allowed,
            )
            if why is not None:
                self._keep(case, [{"memory": why}], Ended("done", time.time()))
                return
        task = TimingTask(self.settings, case, self.device, allowed)
        before = load.read()
        heard, ended = listen(lambda tell, page: work.measure(task, tell, page), self.settings.timeout_s)
        foreign, _ = load.shares(before, load.read())
        self._keep(case, heard, ended, foreign)

    def _keep(self, case: Case, heard: Heard, ended: Ended, foreign: float | None = None) -> None:
        """Combine the newest launch of a row with its earlier ones, and write the row."""
        rate, earlier = self.rates.get(case.precision), self.rows.get(case)
        self.rows[case] = judged(
            self.settings,
            case,
            heard,
            ended,
            size=own_size(self.own) if case.is_own else size_of(self.settings, case),
            matmul_rate=rate,
            earlier=earlier,
            foreign=foreign,
        )
        self._write(self.rows[case])

    def _find_types(self, case: Case) -> None:
        """Write the dtypes of each layer of one model, or a row with the reason if the model cannot be built."""
        task = TimingTask(self.settings, case, self.device, memory.allowed_bytes(self.settings.memory_share))
        heard, ended = listen(lambda tell, page: work.find_types(task, tell), self.settings.timeout_s)
        layers = merged(heard).get("layers")
        if layers is None:
            self._keep(case, heard, ended)
            return
        types = [LayerTypes.model_validate(layer) for layer in layers]
        self._write(Dtypes(model=case.model, precision=case.precision, layers=types))


def listen(do: Callable[[Tell, Page], None], timeout_s: float) -> tuple[Heard, Ended]:
    """Run a function in a forked process, killed at the timeout; return all its messages, and how it ended."""
    heard: Heard = []
    deadline = time.monotonic() + timeout_s
    return heard, Forked(do).followed(heard.append, lambda: time.monotonic() >= deadline, POLL_S)


def merged(heard: Heard) -> dict[str, Any]:
    """Merge all messages into one; later values replace earlier ones."""
    return {key: value for message in heard for key, value in message.items()}


@dataclass(frozen=True)
class ModelSize:
    """The size of a model: its parameters, the operations of one sample's forward and backward, and its tokens."""

    parameters: int
    forward: int
    backward: int
    context: int | None  # None if samples are not sequences of tokens


def size_of(settings: TimingSettings, case: Case) -> ModelSize:
    """Return the size of a model that ships with Muster."""
    shape = settings.shape(case)
    parts = anatomy(shape).parts
    forward, backward = sum(part.flops for part in parts), sum(part.backward_flops for part in parts)
    return ModelSize(shape.parameter_count(), forward, backward, None if case.is_image else settings.context)


def own_size(told: dict[str, Any]) -> ModelSize:
    """Return the size of the model of `train`, as the survey counted it; zeros if it could not be counted."""
    forward, whole = told.get("flops", (0, 0))
    return ModelSize(told.get("parameters", 0), forward, whole - forward, told.get("context"))


def judged(
    settings: TimingSettings,
    case: Case,
    heard: Heard,
    ended: Ended,
    *,
    size: ModelSize,
    matmul_rate: float | None = None,
    earlier: Timed | None = None,
    foreign: float | None = None,
) -> Timed:
    """Return the row of a case from its earlier launches, the messages of its process, and how the process ended."""
    told = merged(heard)
    seconds = [round(message["step"], DIGITS) for message in heard if "step" in message]
    warm_up, steps = seconds[: settings.warmup], seconds[settings.warmup :]
    launches = [Launch(warm_up=len(warm_up), steps=len(steps), time=ended.time, foreign=foreign)]
    peaks = [told["peak_bytes"]] if "peak_bytes" in told else []
    if earlier is not None:
        warm_up, steps = earlier.warm_up_s + warm_up, earlier.steps_s + steps
        launches = earlier.launches + launches
        peaks += [earlier.peak_bytes] if earlier.peak_bytes is not None else []
    state, reason = verdict_of(settings, told, len(seconds), ended)
    flops = settings.batch * (size.forward + (size.backward if case.pass_name != "forward" else 0))
    summary = summarized(steps)
    units = settings.batch * (size.context or 1)
    flops_per_s = flops / summary.mean_s if summary is not None and flops else None
    return Timed(
        model=case.model,
        pass_name=case.pass_name,
        precision=case.precision,
        state=state,
        reason=reason,
        parameters=size.parameters,
        batch=settings.batch,
        context=size.context,
        is_own=case.is_own,
        build_s=told.get("build_s"),
        warm_up_s=warm_up,
        steps_s=steps,
        launches=launches,
        summary=summary,
        rate=units / summary.mean_s if summary is not None else None,
        flops=flops,
        flops_per_s=flops_per_s,
        matmul_share=flops_per_s / matmul_rate if flops_per_s and matmul_rate else None,
        peak_bytes=max(peaks) if state == "ok" and peaks else None,
        time=time.time(),
    )


def verdict_of(settings: TimingSettings, told: dict[str, Any], steps: int, ended: Ended) -> tuple[State, str]:
    """Return the state of a row and the reason."""
    for state in ("memory", "refused"):
        if state in told:
            return cast(State, state), told[state]
    if ended.how == "silent":
        wanted = settings.warmup + settings.steps
        done = "its model was not built" if "build_s" not in told else f"{steps} of {counted(wanted, 'step')} were done"
        return "timeout", f"{done} in {settings.timeout_s:g} s (--timeout)"
    if ended.how == "done":
        return "ok", ""
    if memory.SAID.search(ended.message):
        return "memory", f"{ended.message}; use a smaller batch or model"
    if ended.message.startswith(KILLED):
        return "memory", f"{KILLED}, probably by the kernel because memory ran out; use a smaller batch or model"
    return "failed", ended.message


def summarized(seconds: Sequence[float]) -> TimingSummary | None:
    """Return mean, deviation and minimum of the measured steps; None if there are none."""
    if not seconds:
        return None
    deviation = round(statistics.stdev(seconds), DIGITS) if len(seconds) > 1 else None
    return TimingSummary(
        n=len(seconds), mean_s=round(statistics.fmean(seconds), DIGITS), std_s=deviation, min_s=min(seconds)
    )
