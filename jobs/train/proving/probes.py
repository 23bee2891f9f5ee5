"""One probe in a process of its own: join a fresh group, import the user's class, check it, report rows.

A failure ends only this process. The process sends reports as JSON lines to the rank that forked it:

    {"kind": name}                               the kind of the class
    {"rows": [...]}                              the checked properties, also those checked before a failure
    {"refused": {"message", "traceback"}}        the class cannot be imported or built as its kind
    {"failed": {"step", "error", "traceback"}}   the user's code raised
    {"silent": bool, "stuck": {...} or null}     no progress for too long, or progress again; in the user's code, where
    {"victim": true}                             the connection to another rank was lost
"""

import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.node.page import Page
from muster.jobs.train.main import make_deterministic
from muster.jobs.train.proving import optimizers, pipes, shards, training, wrappers
from muster.jobs.train.proving.bench import Bench
from muster.jobs.train.proving.kinds import load_class
from muster.jobs.train.proving.traffic import Traffic
from muster.jobs.user import code
from muster.jobs.world.failures import is_lost_connection
from muster.jobs.world.forked import Tell
from muster.jobs.world.meeting import connect
from muster.jobs.world.world import open_world

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

Probe = Callable[[Bench], None]

# The probes of each kind, in order. If a probe raises, the property of the same name fails.
PROBES: Final[Mapping[str, Mapping[str, Probe]]] = {
    "wrapper": {
        "runs": wrappers.synchronizes,
        "micro-batches": wrappers.accumulates,
        "unused": wrappers.unused,
        "one-process": training.trains,
        "unused-somewhere": wrappers.unused_somewhere,
    },
    "optimizer": {
        "runs": optimizers.steps,
        "groups": optimizers.groups,
        "settings": optimizers.settings,
        "one-process": training.trains,
    },
    "sharded": {"runs": shards.keeps, "micro-batches": shards.accumulates, "one-process": training.trains},
    "pipeline": {"runs": pipes.pipes, "one-process": training.trains},
}
LEAST_POLL_S: Final = 0.05


@dataclass(frozen=True)
class ProbeRequest:
    """The options of `muster verify --with` for a rank."""

    text: str
    kind: str | None
    args: Mapping[str, Any]
    steps: int
    silent_s: float  # a rank without progress for this long is stuck
    folder: Path
    probes: tuple[str, ...] = ()  # the probes to run after the first one; if empty, all probes are run


class ProbeProgress:
    """The progress of the probe. A separate thread reports when none was made for too long.

    A machine may have more work than cores. So the time counts in which the main thread could run, not all time.
    """

    def __init__(self, tell: Tell, silent_s: float, folder: Path, traffic: Traffic) -> None:
        self.step = "construction"
        self._tell, self._silent_s, self._folder, self._traffic = tell, silent_s, folder, traffic
        self._main, self._stat = threading.get_ident(), Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._busy, self._since = False, self._clock()
        threading.Thread(target=self._watch, daemon=True).start()

    def mark(self, step: str) -> None:
        """Record that the user's code begins a step; "" records that it has ended."""
        self._busy, self._since = bool(step), self._clock()
        self.step = step or self.step

    def _clock(self) -> float:
        """Return the time without that in which the main thread waited for a core, in seconds."""
        try:
            waited_ns = int(self._stat.read_text().split()[1])
        except OSError:  # a kernel without these statistics
            waited_ns = 0
        return time.monotonic() - waited_ns / 1e9

    def _watch(self) -> None:
        was_silent = False
        while True:
            time.sleep(min(LEAST_POLL_S, self._silent_s / 10))
            silent = self._clock() - self._since > self._silent_s
            if silent != was_silent:
                where = place(sys._current_frames().get(self._main), self._folder)
                what = {"step": self.step, "where": where, "doing": self._traffic.doing, "limit_s": self._silent_s}
                self._tell({"silent": silent, "stuck": what if silent and self._busy else None})
                was_silent = silent


def place(frame: FrameType | None, folder: Path) -> str:
    """Return the innermost line of the user's own code in a stack, as `FILE.py:LINE in FUNCTION`."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if code.is_own_file(path, folder):
            return f"{path.relative_to(folder)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def probe_in_child(
    name: str,
    number: int,
    asked: ProbeRequest,
    settings: "TrainSettings",
    env: RankEnv,
    device: torch.device,
    timeout_s: float,
) -> Callable[[Tell, Page], None]:
    """Return the function for a forked process: it runs probe `name` in a process group named by `number`."""

    def work(tell: Tell, page: Page) -> None:
        traffic = Traffic()
        bench = None
        progress = ProbeProgress(tell, asked.silent_s, asked.folder, traffic)
        try:
            make_deterministic(settings)
            warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about renamed functions
            progress.mark("import")
            user = load_class(asked.text, asked.kind, asked.args, asked.folder)
            progress.mark("")
            world = open_world(PrefixStore(f"probe-{number}", connect(env, timeout_s)), env, device, timeout_s)
            control = dist.new_group(backend="gloo")
            bench = Bench(world, user, settings, asked.steps, traffic, control, progress.mark)
            tell({"kind": user.kind.name})
            PROBES[user.kind.name][name](bench)
        except RefusedError as error:
            cause = error.__cause__
            said = code.own_traceback(cause, asked.folder) if cause is not None else ""
            tell({"refused": {"message": str(error), "traceback": said}})
        except Exception as error:
            tell(failure_report(error, progress.step, asked.folder))
        finally:
            if bench is not None:
                tell({"rows": bench.rows})

    return work


def failure_report(error: Exception, step: str, folder: Path) -> dict[str, Any]:
    """Return the report of an exception: another rank's failure, or this rank's own with its traceback."""
    if is_lost_connection(error):
        return {"victim": True}
    traced = code.own_traceback(error, folder)
    if not code.is_of_user(error, folder):
        traceback.print_exception(error)
    return {"failed": {"step": step, "error": code.spelt(error), "traceback": traced}}
