"""The history of one attempt: its events, and its row in attempts.jsonl (steps, and the cost of start and end).

The durations in the row:

    … failed ──detect──→ decided ──stop──→ over ──start──→ joined ──load──→ first step ──replay──→ last step reached
      of the attempt before                      of the next one                                   before the failure
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.reading import UntrustedError
from muster.launch.plan.plan import Context
from muster.launch.records.advice import next_step
from muster.launch.records.eventlog import EventLog
from muster.launch.records.runrows import IN_MEMORY, LIVING, last_metrics, number
from muster.launch.records.verdict import RankEnd, Verdict
from muster.launch.supervision.console import Console
from muster.launch.supervision.run_nodes import NodeState

TIMES: Final = {"loaded": "load_s", "replayed": "replay_s"}  # reports that contain a duration
SAVED: Final = "saved after step"  # in the message of a drain whose save succeeded


class Story:
    """The history of one attempt so far."""

    def __init__(self, context: Context, log: EventLog, console: Console) -> None:
        self.context = context
        self.log = log
        self.console = console
        self.number = context.attempt
        resume, in_place = (context.options.get(name) or {} for name in ("resume", "in_place"))
        chosen = resume or in_place
        self.origin: str | None = chosen.get("checkpoint")
        self.origin_step: int = chosen.get("step", 0)
        self.from_memory = bool(chosen.get("memory"))  # the origin is in the nodes' memory, not on the disk
        self.began = time.time()
        self.first_step: int | None = None
        self.start_s = 0.0  # the time to the first step
        self.saved_step: int | None = None
        # the steps of the state with which living ranks continue: until they report them, those done before
        self.regrouped: int | None = None if resume else in_place.get("done")
        self.saved: str | None = None  # the newest checkpoint of this attempt
        self.copied_step: int | None = None  # the newest state of this attempt that is complete in the nodes' memory
        self.has_session = False  # the program has opened a session
        self.failed_at: float | None = None  # Unix seconds, on the supervisor's clock
        self.failed_step: int | None = None
        self.decided_at: float | None = None  # when the supervisor decided to end the attempt
        self.times: dict[str, float] = {}

    @property
    def has_checkpoint(self) -> bool:
        """True when the run has a checkpoint to resume from."""
        return self.saved_step is not None or (self.origin is not None and not self.from_memory)

    def session_opened(self) -> None:
        """Record that the program has opened a session, so that it reports progress, saves and can be drained."""
        if not self.has_session:
            self.has_session = True
            self.log.event("session", attempt=self.number)

    def joined(self, ranks: int, seconds: float) -> None:
        """Record that all ranks have joined."""
        self.times["start_s"] = round(seconds, 3)
        self.log.event("joined", attempt=self.number, seconds=round(seconds, 3))
        self.console.say(f"{ranks} rank{'s' * (ranks != 1)} joined after {seconds:.1f} s")

    def told(self, rank: int, report: Mapping[str, Any]) -> None:
        """Handle a rank's report; most come from rank 0."""
        what = report["report"]
        if what == "progress":
            self.console.progress(report)
            return
        if what == "first_step":
            self.first_step, self.start_s = report["step"], time.time() - self.began
        elif what == "regrouped":
            self.regrouped = report["step"]
        elif what in TIMES:
            self.times[TIMES[what]] = round(report["seconds"], 3)
        elif what == "saved":
            self.saved_step, self.saved = report["step"], report["checkpoint"]
        tell = self.log.tell if what == "missed" else self.log.event
        tell(what, attempt=self.number, rank=rank, **{k: v for k, v in report.items() if k != "report"})

    def failed(self, ending: RankEnd) -> None:
        """Record the first failure."""
        if self.failed_at is None:
            self.failed_at, self.failed_step = ending.ended, ending.step

    def last_step(self, nodes: list[NodeState]) -> int:
        """Return how many steps were done: the maximum in the ranks' reports, the metrics and the checkpoints."""
        said = max((node.progress["steps"] for node in nodes if node.progress), default=0)
        try:
            row, _ = last_metrics(self.context.run)
        except UntrustedError:  # the file was replaced by another user; use the ranks' reports
            row = {}
        logged = number(row.get("step")) or 0 if row.get("attempt") == self.number else 0
        return max(said, logged, self.failed_step or 0, self.saved_step or 0, self.regrouped or self.origin_step)

    @property
    def newest(self) -> dict[str, Any]:
        """The newest checkpoint on disk: {"checkpoint": its name or None, "step": n}."""
        if self.saved_step is not None:
            return {"checkpoint": self.saved, "step": self.saved_step}
        if self.from_memory:
            return {"checkpoint": None, "step": 0}
        return {"checkpoint": self.origin, "step": self.origin_step}

    def row(
        self,
        nodes: list[NodeState],
        verdict: Verdict,
        following: str,
        over: float,
        *,
        in_place: bool = False,
        in_memory: int = 0,
    ) -> dict[str, Any]:
        """Return the attempt's row without the verdict's record. `over`: when its last rank ended (Unix seconds).

        `in_place`: ranks continue in the next attempt, so that no completed step is lost. `in_memory`: the step of the
        newest checkpoint in the memory of the living nodes.
        """
        times = dict(self.times)
        if self.decided_at is not None:
            if self.failed_at is not None:
                times["detect_s"] = round(max(0.0, self.decided_at - self.failed_at), 3)
            times["stop_s"] = round(max(0.0, over - self.decided_at), 3)
        last = self.last_step(nodes)
        kept = max(self.newest["step"], in_memory)
        origin = f"{self.origin}{IN_MEMORY}" if self.from_memory else self.origin
        settings = self.context.job.settings
        return {
            "cause": verdict.message,
            "mode": getattr(settings, "mode_name", None),
            "world_size": self.context.placement.world_size,
            "hosts": [node.host for node in self.context.placement.nodes],
            "from": origin if self.regrouped is None else LIVING,
            "from_step": self.origin_step if self.regrouped is None else self.regrouped,
            "last_step": last,
            "saved_step": self.saved_step,
            "lost_steps": max(0, last - kept) if verdict.code and not in_place else 0,
            "times": times,
            "next": following,
        }


def last_advice(verdict: Verdict, story: Story | None) -> str:
    """Return advice after the end of a run; `story`: the history of its last attempt."""
    unsaved = verdict.code == exits.STOPPED and (story is None or not story.has_checkpoint)
    unsaved |= verdict.code == exits.REQUEUE and SAVED not in verdict.message
    about = f"{verdict.name}-unsaved" if unsaved else verdict.name
    return next_step(about, asdict(verdict.first) if verdict.first else None, verdict.message)
