"""`muster predict JOB --goodput`: the share of time that goes into useful steps while nodes fail, by a formula.

    step step step | save step step ✗ detect stop start load | step step ...
                     └─ lost: done again after the restart ┘

    useful = t / M exp(-r / M) / (exp((t + s) / M) - 1)          Daly 2006, for failures at random times

t: seconds of training between saves; s: stall of a save; M: mean time between failures of the run; r: what a failure
costs besides the steps since the last save: the restart, and the steps during a save that is not yet complete. A spare
node is always ready.
"""

import re
from dataclasses import dataclass
from math import ceil, exp, expm1, sqrt
from typing import Any, Final

from muster.jobs.basics.errors import UsageError
from muster.launch.bench import counting, loads
from muster.launch.bench.source import quantity
from muster.launch.bench.wanted import Wanted

UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)?", re.IGNORECASE)
COLUMNS: Final = ("save every>", "goodput>", "note")

# Times of Muster itself, from docs/measured.md.
RESTART_S: Final = 6.4  # "power loss of one of 4 nodes": until the first new step
COPY_BYTES_S: Final = 5.9e9  # "training stalls during a save of 200 MB": 34 ms
STORAGE_BYTES_S: Final = 1e9  # of a node, to shared storage: an assumption


@dataclass(frozen=True)
class GoodputWanted(Wanted):
    """The request: that of `muster predict`, and times as text."""

    node_mtbf: str | None = None
    save_every: str | None = None
    step: str | None = None
    stall: str | None = None
    save_time: str | None = None
    restart: str | None = None


@dataclass(frozen=True)
class FailingRun:
    """The times of a run, in seconds: between failures, of a step, of a save's stall, of a save, of a restart."""

    mtbf_s: float
    step_s: float = 1.0
    stall_s: float = 0.034
    save_s: float = 1.0
    restart_s: float = RESTART_S

    @property
    def young_s(self) -> float:
        """Young's interval between saves (1974), but at least a step."""
        return max(sqrt(2 * self.stall_s * self.mtbf_s), self.step_s)

    @property
    def daly_s(self) -> float:
        """Daly's interval between saves (2006), but at least a step; the MTBF if a stall takes twice as long."""
        if self.stall_s >= 2 * self.mtbf_s:
            return max(self.mtbf_s, self.step_s)
        root = sqrt(self.stall_s / (2 * self.mtbf_s))
        best_s = sqrt(2 * self.stall_s * self.mtbf_s) * (1 + root / 3 + root**2 / 9) - self.stall_s
        return max(best_s, self.step_s)

    def shares(self, interval_s: float) -> dict[str, float]:
        """Return the shares of the time by kind. A save begins at the first end of a step after the interval."""
        work_s = ceil(interval_s / self.step_s) * self.step_s
        cycle = (work_s + self.stall_s) / self.mtbf_s
        failing = (self.restart_s + self.save_s) / self.mtbf_s
        useful = work_s / self.mtbf_s * exp(-failing - cycle) / -expm1(-cycle)
        restarts = -expm1(-self.restart_s / self.mtbf_s)
        stalls = (1 - restarts) * self.stall_s / (work_s + self.stall_s)
        return {"useful": useful, "stalls": stalls, "lost_steps": 1 - restarts - stalls - useful, "restarts": restarts}


def predict(asked: GoodputWanted) -> dict[str, Any]:
    """Return the prediction as plain values, in seconds.

    Raises:
        UsageError, JobFileError: if an option or the job is wrong.
        RefusedError: if the job does not train.
    """
    if asked.node_mtbf is None:
        raise UsageError("--goodput: needs --node-mtbf TIME, the mean time between failures of one node, such as 100d")
    nodes, run, state_bytes = _failing_run(asked, _seconds("--node-mtbf", asked.node_mtbf))
    asked_s = run.daly_s if asked.save_every is None else _seconds("--save-every", asked.save_every)
    shares = run.shares(asked_s)
    return {
        "nodes": nodes,
        "state_bytes": state_bytes,
        "times": vars(run),
        "interval_s": asked_s,
        "young_s": run.young_s,
        "daly_s": run.daly_s,
        "intervals": [(each_s, run.shares(each_s)["useful"]) for each_s in (run.young_s, run.daly_s, asked_s)],
        "goodput": shares["useful"],
        "shares": shares,
    }


def _failing_run(asked: GoodputWanted, node_mtbf_s: float) -> tuple[int, FailingRun, float]:
    """Return the number of nodes, the times of the run, and the bytes of its state."""
    from muster.collectives_bench.cost.memory import states

    job = loads.train_job(asked.job, asked.overrides)
    nodes = job.nodes if asked.nodes is None else asked.nodes
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: must be 1 or more")
    ranks_per_node = job.ranks_per_node if isinstance(job.ranks_per_node, int) else 1
    own = counting.own_code(job, job.settings)  # type: ignore[arg-type]
    load = loads.load_of(job, ranks=job.nodes * ranks_per_node, backend=asked.backend or "gloo", own=own)
    held = states(load.model.elements, load.recipe, trained=load.model.trained)
    saved = held.parameters + held.optimizer
    here = saved / nodes  # every part of the state is saved once, by one of the ranks
    run = FailingRun(
        node_mtbf_s / nodes,
        _or(asked.step, "--step", 1.0),
        _or(asked.stall, "--stall", here / ranks_per_node / COPY_BYTES_S),
        _or(asked.save_time, "--save-time", here / STORAGE_BYTES_S),
        _or(asked.restart, "--restart", RESTART_S),
    )
    return nodes, run, saved


def _or(text: str | None, flag: str, default: float) -> float:
    return default if text is None else _seconds(flag, text)


def _seconds(flag: str, text: str) -> float:
    return quantity(flag, text, _TIME, UNITS, "a time such as 30s, 10min, 6h or 100d")


def render(record: dict[str, Any]) -> str:
    """Format the prediction as text."""
    from muster.launch.common import screen

    clock, times = screen.duration, record["times"]
    notes = ("Young 1974", "Daly 2006", "asked for")[: 2 + (record["interval_s"] != record["daly_s"])]
    rows = [
        [clock(interval_s), f"{useful:.2%}", note]
        for (interval_s, useful), note in zip(record["intervals"], notes, strict=False)
    ]
    shares = ", ".join(f"{kind.replace('_', ' ')} {share:.2%}" for kind, share in record["shares"].items())
    return "\n".join(
        [
            f"{record['nodes']} nodes: one failure in {clock(times['mtbf_s'])}",
            f"step {clock(times['step_s'])}, save stalls {times['stall_s']:.3g} s and takes {clock(times['save_s'])}, "
            f"restart {times['restart_s']:.1f} s",
            "",
            screen.table(COLUMNS, rows),
            "",
            f"time with a save every {clock(record['interval_s'])}: {shares}",
        ]
    )
