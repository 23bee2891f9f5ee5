"""Run folders as training ranks write them, with times that are given."""

import json
import random
from pathlib import Path
from typing import Any

from muster.jobs.runfolder.rundir import RunDir

JOB = "nodes: 1\nranks_per_node: {ranks}\ntrain: {{model: gpt-nano, data: synthetic, mode: {mode}, batch_size: 16}}\n"


def row(step: int, rank: int, seconds: float, **more: Any) -> dict[str, Any]:
    """A rank's row: half of the step computes, a quarter waits, a tenth is the optimizer's."""
    parts = {"forward_s": 0.2, "backward_s": 0.3, "communication_s": 0.25, "optimizer_s": 0.1, "data_s": 0.0}
    times = {name: share * seconds for name, share in parts.items()}
    rate = {"rate": 8 * 64 / seconds, "unit": "tokens/s", "samples": 8}
    return {"step": step, "epoch": 1 + (step - 1) // 10, "rank": rank, "step_s": seconds, **times, **rate, **more}


def make_run(
    root: Path,
    name: str,
    seconds: float = 0.1,
    *,
    ranks: int = 2,
    mode: str = "ddp",
    steps: int = 30,
    began: float = 0.0,
) -> RunDir:
    """Write the folder of a run whose first two steps are slow, and whose last rank is the slowest."""
    run = RunDir(root / f"{name}-20260101T000000.{int(began):03d}Z-abcdef")
    folder = run.attempt(0).path
    folder.mkdir(parents=True)
    run.path.chmod(0o700)
    run.job.write_text(JOB.format(ranks=ranks, mode=mode))
    (run.path / "events.jsonl").write_text("")
    draw = random.Random(name)
    of_steps = [seconds * draw.uniform(0.98, 1.02) * (5 if step <= 2 else 1) for step in range(1, steps + 1)]
    for rank in range(ranks):
        rows = [
            row(step, rank, each * (1 if rank == ranks - 1 else 0.9), time=1e9 + began + step)
            for step, each in enumerate(of_steps, 1)
        ]
        run.attempt(0).metrics(rank).write_text("".join(json.dumps(each) + "\n" for each in rows))
    losses = [
        {"step": step, "loss": 5.0 - step / 100, "attempt": 0, "unit": "tokens/s"} for step in range(1, steps + 1)
    ]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in losses))
    return run
