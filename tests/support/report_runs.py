"""Run folders that no run wrote: everything that a report shows, with a word of the test's in every free text."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.jobs.runfolder.rundir import RunDir
from muster.launch.sweeps.sweep import SweepPoint, SweepRecord

MB = 1 << 20
BEGAN = 1_790_000_000.0
JOB = """\
name: {name}
nodes: 1
ranks_per_node: {ranks}
train: {{model: gpt-nano, data: synthetic, mode: {mode}, batch_size: 16}}
# {word}
"""


def lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(
    root: Path, name: str, *, mode: str = "ddp", ranks: int = 2, steps: int = 30, word: str = "", fails: bool = False
) -> RunDir:
    """Write the folder of a run of one attempt, or of two where the first fails in the middle."""
    run = RunDir(root / f"{name}-20260101T000000.000Z-abcdef")
    run.path.mkdir(parents=True, mode=0o700)
    draw, middle = random.Random(name), steps // 2 if fails else 0
    run.job.write_text(JOB.format(name="demo", ranks=ranks, mode=mode, word=word), errors="replace")
    for attempt, (first, last) in enumerate([(1, middle), (middle + 1, steps)] if fails else [(1, steps)]):
        run.attempt(attempt).path.mkdir()
        for rank in range(ranks):
            rows = [step_row(step, rank, draw.uniform(0.09, 0.11), ranks, word) for step in range(first, last + 1)]
            lines(run.attempt(attempt).metrics(rank), rows)
            lines(run.attempt(attempt).memory(rank), memory_rows(rank, ranks, mode, attempt, word))
        place(run.attempt(attempt).placement, ranks, word)
        write_profile(run.attempt(attempt).profile(0).path, attempt, ranks, mode, word)
    losses = [
        {"step": step, "loss": 5 - step / steps, "attempt": 0, "unit": "tokens/s"} for step in range(1, steps + 1)
    ]
    lines(run.metrics, losses)
    lines(run.events, events(name, ranks, word, fails))
    lines(run.attempts, attempts(ranks, steps, middle, mode, word))
    return run


def step_row(step: int, rank: int, seconds: float, ranks: int, word: str) -> dict[str, Any]:
    shares = {"forward_s": 0.2, "backward_s": 0.3, "communication_s": 0.25, "optimizer_s": 0.1, "data_s": 0.01}
    row = {"step": step, "epoch": 1, "rank": rank, "step_s": seconds, "time": BEGAN + step, "note": word}
    rate = {"rate": 1024 / ranks / seconds, "unit": "tokens/s", "loss": 5.0}
    return {**row, **{name: share * seconds for name, share in shares.items()}, **rate}


def memory_rows(rank: int, ranks: int, mode: str, attempt: int, word: str) -> list[dict[str, Any]]:
    facts = {"rank": rank, "world_size": ranks, "attempt": attempt, "mode": mode, "device": "cpu", "host": f"n0{word}"}
    held = {"parameters": MB, "gradients": MB, "optimizer": 2 * MB, "buffers": 0}
    sizes = {"rss": 308 * MB, "files": 40 * MB}
    start = {"rss": 300 * MB, "files": 40 * MB}
    points = [{"point": point, "step": 1, "held": held, "now": sizes, "peak": {"rss": 309 * MB}} for point in STEPS]
    version = {"torch": f"2.13{word}", "python": "3.11"}
    return [{"point": "baseline", **facts, **version, "first": 0, "now": start}, *points]


STEPS = ("init", "before_step", "after_step")


def place(path: Path, ranks: int, word: str) -> None:
    node = {"node_rank": 0, "host": f"n0{word}", "address": f"10.0.0.1{word}", "first_rank": 0, "ranks": ranks}
    path.write_text(json.dumps({"version": 1, "world_size": ranks, "master_addr": "", "nodes": [node]}))


def write_profile(folder: Path, attempt: int, ranks: int, mode: str, word: str) -> None:
    folder.mkdir()
    step = {"step": 6, "seconds": 0.1, "communication_s": 0.02, "hidden_s": 0.01, "device_s": None, "overlap": 0.5}
    record = {"version": 1, "rank": 0, "world_size": ranks, "attempt": attempt, "host": f"n0{word}", "mode": mode}
    record |= {"device": "cpu", "steps_of_job": 30, "steps": [step], "overlap": 0.5, "matmul_share": 0.5, "kernels": []}
    record |= {"phases": {"forward": 0.04, "backward": 0.06}, "operators": [], "kinds": {"matmul": 0.05, "other": 0.03}}
    record |= {"modules": {"attention": 0.03, "mlp": 0.04, f"norm{word}": 0.01}}
    record |= {"memory_over_time": [[step / 100, MB * (1 + step % 5)] for step in range(20)]}
    each = {"operator": f"aten::mm{word}", "module": f"mlp{word}", "step": 6, "alive_s": 0.02}
    record |= {"allocations": [{"bytes": size * MB, **each} for size in (3, 2, 1)]}
    (folder / "profile.json").write_text(json.dumps(record))
    names = [(0, "all", 100.0), (1, "forward", 40.0), (2, f"aten::mm{word}", 30.0), (1, "backward", 60.0)]
    names += [(2, "MmBackward0", 50.0), (3, "aten::mm", 45.0)]
    rows = [[depth, name, "matmul" if "mm" in name else "other", 1e3 * us, 2] for depth, name, us in names]
    (folder / "flame.json").write_text(json.dumps({"version": 1, "frames": rows, "left_out": 0}))


def events(name: str, ranks: int, word: str, fails: bool) -> list[dict[str, Any]]:
    submitted = {"event": "submitted", "name": f"{name}{word}", "kind": "train", "transport": "local", "nodes": 1}
    found: list[dict[str, Any]] = [{**submitted, "host": f"gone{word}", "pid": 1, "pid_start": 1, "world_size": ranks}]
    for attempt in range(1 + fails):
        found.append({"event": "attempt", "attempt": attempt, "world_size": ranks, "hosts": [f"n0{word}"]})
        ended = {"code": 1, "class": "failed"} if fails and not attempt else {"code": 0, "class": "done"}
        found.append({"event": "attempt_ended", "attempt": attempt, **ended, "message": f"it ended {word}"})
    found.append({"event": "ended", "attempt": int(fails), "code": 0, "class": "done", "message": f"it is over {word}"})
    return [{"time": BEGAN + place, **row} for place, row in enumerate(found)]


def attempts(ranks: int, steps: int, middle: int, mode: str, word: str) -> list[dict[str, Any]]:
    of_all = {"mode": mode, "world_size": ranks, "hosts": [f"n0{word}"]}
    done = {"class": "done", "code": 0, "cause": f"{ranks} ranks ended with 0", "next": "the run is over"}
    done |= {"from_step": middle, "last_step": steps, "times": {"start_s": 2.0, "load_s": 0.5}}
    if not middle:
        return [{"attempt": 0, "started": BEGAN, "ended": BEGAN + 30, **of_all, **done}]
    lost = {"class": "failed", "code": 1, "cause": f"rank 1 died {word}", "from_step": 0, "last_step": middle + 2}
    first = {"rank": 1, "node": 0, "host": f"n0{word}", "code": 1, "ended": BEGAN + 15, "cause": "own"}
    lost |= {"first": {**first, "last_lines": [f"boom {word}"]}, "lost_steps": 2, "times": {"detect_s": 0.1}}
    after = {"attempt": 1, "started": BEGAN + 17, "ended": BEGAN + 40, **of_all, **done}
    return [{"attempt": 0, "started": BEGAN, "ended": BEGAN + 16, **of_all, **lost}, after]


def write_sweep(root: Path, name: str, runs: dict[str, RunDir]) -> Path:
    """Write a sweep of these runs, each under the overrides of its point."""
    folder = root / f"sweep-{name}-20260101T000000.000Z-abcdef"
    folder.mkdir(mode=0o700)
    points = tuple(
        SweepPoint(place, tuple(label.split()), run.run_id) for place, (label, run) in enumerate(runs.items())
    )
    SweepRecord(name, "job.yaml", "local", BEGAN, points, tuple(run.run_id for run in runs.values())).write(folder)
    return folder
