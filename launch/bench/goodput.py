"""`muster predict JOB --goodput`: the share of a month that goes into useful steps, while nodes fail and come back."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import UsageError
from muster.launch.bench import counting, loads
from muster.launch.bench.source import quantity
from muster.launch.bench.wanted import Wanted

if TYPE_CHECKING:
    from muster.collectives_bench.cost.goodput import Goodput, RunTimes

UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)?", re.IGNORECASE)
SPARES: Final = (0, 1, 2, 4, 8, 16, 32)
LARGEST: Final = 10**6
LEAST_S: Final = 1e-6
COLUMNS: Final = ("save every>", "goodput>", "note")


@dataclass(frozen=True)
class GoodputWanted(Wanted):
    """The request: that of `muster predict`, and times as text."""

    node_mtbf: str | None = None
    days: float = 30.0
    spares: int | None = None
    repair: str = "1h"
    save_every: str | None = None
    step: str | None = None
    stall: str | None = None
    save_time: str | None = None
    restart: str | None = None


def predict(asked: GoodputWanted) -> dict[str, Any]:
    """Return the prediction as plain values, in seconds.

    Raises:
        UsageError, JobFileError: if an option or the job is wrong.
        RefusedError: if the job does not train.
    """
    from muster.collectives_bench.cost import goodput

    if asked.node_mtbf is None:
        raise UsageError("--goodput: needs --node-mtbf TIME, the mean time between failures of one node, such as 100d")
    if asked.spares is not None and not 0 <= asked.spares <= LARGEST:
        raise UsageError(f"--spares {asked.spares}: must be a number from 0")
    if not 0 < asked.days <= 3660:
        raise UsageError(f"--days {asked.days:g}: must be more than 0 and at most 3660")
    nodes, times, state_bytes = _times(asked)
    faults = goodput.Faults(
        nodes, _seconds("--node-mtbf", asked.node_mtbf), repair_s=_seconds("--repair", asked.repair)
    )
    horizon_s = asked.days * 86400.0
    expected = horizon_s / faults.mtbf_s
    if expected > LARGEST:
        raise UsageError(f"--node-mtbf {asked.node_mtbf}: {expected:.3g} failures are too many to simulate")
    plenty = replace(faults, spares=max(SPARES) if asked.spares is None else asked.spares)
    best_s, tried = goodput.best_interval(times, plenty, horizon_s=horizon_s)
    used_s = best_s if asked.save_every is None else _seconds("--save-every", asked.save_every)
    best_spares, spares = goodput.best_spares(times, faults, used_s, SPARES, horizon_s=horizon_s)
    kept = best_spares if asked.spares is None else asked.spares
    found = goodput.simulate(times, replace(faults, spares=kept), used_s, horizon_s=horizon_s)
    return {
        "nodes": nodes,
        "node_mtbf_s": faults.node_mtbf_s,
        "mtbf_s": faults.mtbf_s,
        "days": asked.days,
        "state_bytes": state_bytes,
        "times": vars(times),
        "repair_s": faults.repair_s,
        "interval_s": used_s,
        "best_interval_s": best_s,
        "young_s": goodput.young_s(times.stall_s, faults.mtbf_s),
        "daly_s": goodput.daly_s(times.stall_s, faults.mtbf_s),
        "intervals": tried,
        "spares": kept,
        "best_spares": best_spares,
        "by_spares": spares,
        **_result(found),
    }


def _result(found: "Goodput") -> dict[str, Any]:
    quantiles = {f"{100 * share:g} %": found.at(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)}
    return {"goodput": found.shares["useful"], "shares": found.shares, "failures": found.failures, "at": quantiles}


def _times(asked: GoodputWanted) -> "tuple[int, RunTimes, float]":
    """Return the number of nodes, the times of the run, and the bytes of its state."""
    from muster.collectives_bench.cost import goodput
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
    times = goodput.RunTimes(
        step_s=max(_or(asked.step, "--step", 1.0), LEAST_S),
        stall_s=_or(asked.stall, "--stall", here / ranks_per_node / goodput.COPY_BYTES_S),
        save_s=_or(asked.save_time, "--save-time", here / goodput.STORAGE_BYTES_S),
    )
    if asked.restart is not None:
        restart_s = _seconds("--restart", asked.restart)
        times = replace(times, detect_s=0.0, stop_s=0.0, start_s=restart_s, load_s=0.0)
    return nodes, times, saved


def _or(text: str | None, flag: str, default: float) -> float:
    return default if text is None else _seconds(flag, text)


def _seconds(flag: str, text: str) -> float:
    return quantity(flag, text, _TIME, UNITS, "a time such as 30s, 10min, 6h or 100d")


def render(record: dict[str, Any]) -> str:
    """Format the prediction as text."""
    from muster.launch.common import screen

    clock = screen.duration
    times, at = record["times"], record["at"]
    restart_s = sum(times[key] for key in ("detect_s", "stop_s", "start_s", "load_s"))
    rows = [
        [clock(interval_s), f"{share:.2%}", "best" if interval_s == record["best_interval_s"] else ""]
        for interval_s, share in record["intervals"]
    ]
    shares = ", ".join(f"{kind.replace('_', ' ')} {share:.2%}" for kind, share in record["shares"].items())
    kept = ", ".join(f"{count}: {share:.2%}" for count, share in record["by_spares"])
    return "\n".join(
        [
            f"{record['nodes']} nodes, each fails once in {clock(record['node_mtbf_s'])}: one failure in "
            f"{clock(record['mtbf_s'])}, {record['failures']:.0f} in {record['days']:g} days",
            f"step {clock(times['step_s'])}, save stalls {times['stall_s']:.3g} s and takes {clock(times['save_s'])}, "
            f"restart {restart_s:.1f} s, repair {clock(record['repair_s'])}",
            "",
            screen.table(COLUMNS, rows),
            "",
            f"best interval between saves: {clock(record['best_interval_s'])} "
            f"(Young {clock(record['young_s'])}, Daly {clock(record['daly_s'])})",
            f"spare nodes: {record['best_spares']}; goodput by number of spares: {kept}",
            f"goodput {record['goodput']:.2%} with {record['spares']} spares and a save every "
            f"{clock(record['interval_s'])}; 5 to 95 % of the runs: {at['5 %']:.2%} to {at['95 %']:.2%}",
            f"time: {shares}",
        ]
    )
