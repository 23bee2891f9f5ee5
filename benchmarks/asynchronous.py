"""Asynchronous SGD with parameter servers, in a box of four nodes at 1 Gbit/s.

    pace     steps per second of mode asynchronous over those of mode bucketed, where node 3 has half the speed of the
             others. A step is a whole batch in both modes. The bound is 1.75: the asynchronous nodes work at the speed
             of 3.5 nodes, the synchronous ones at that of the slowest, as 4 half ones
    loss     beside it: steps and seconds until the loss, averaged over 10 steps, is below TARGET
    bytes    payload that the nodes' interfaces sent while every worker made STEPS steps, over the formula of
             `ddp/asynchronous/shards.py`, with 4, 2 and 1 servers; of all nodes, the one furthest from it

A forward and backward is computed, and then the node waits until PASS_S seconds have passed since the forward began,
or twice as many on node 3: four nodes on the cores of one machine have no speed of their own. Messages are real.

    sudo .venv/bin/python benchmarks/asynchronous.py [--rate 1gbit] [--repeats 3] [--steps 60] [--quick]

Reach: pace >= 1.5; bytes within 1 %. About 5 minutes; `--quick` 1.
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from harness import Options, finish, ratio_of, spread, table, turns
from ranks import on_ranks, place
from torch import nn

from muster.cloudlab.box.control import Box
from muster.collectives_bench.ranks.wire import WireCounter
from muster.ddp.asynchronous.optimizer import AsynchronousOptimizer
from muster.ddp.asynchronous.shards import sent_bytes

NODES, SLOW, PASS_S = 4, "node3", 0.25
REACH, REACH_BYTES = 1.5, 0.01
TARGET, RECENT, WARM_UP = 0.5, 10, 5
ELEMENTS, STEPS = 2_500_000, 5
LIMIT_S = 300
MODEL = f"""
import socket
import time

from torch import nn


class Paced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
        self.pass_s = {PASS_S} * (2 if socket.gethostname() == "{SLOW}" else 1)

    def forward(self, images):
        until = time.monotonic() + self.pass_s * self.training
        outputs = self.layers(images)
        time.sleep(max(0.0, until - time.monotonic()))
        return outputs
"""
TRAIN: dict[str, Any] = {
    "model": {"make": "net.py:Paced"},
    "data": "digits",
    "batch_size": 64,
    "evaluate": False,
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.5},
}


def train(box: Box, mode: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train in one mode; return its speed after the first steps, and when it came to the target."""
    (folder / "net.py").write_text(MODEL)
    job = {"name": mode, "nodes": NODES, "workdir": ".", "train": {**TRAIN, "mode": mode, "steps": steps}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    runs = folder / "runs"
    before = set(runs.glob("*/metrics.jsonl"))
    argv = [sys.executable, "-m", "muster", "run", str(folder / "job.yaml"), "--hosts", f"box:{box.name}"]
    done = subprocess.run(
        [*argv, "--runs", str(runs)], capture_output=True, text=True, timeout=LIMIT_S, cwd=folder, check=False
    )
    found = set(runs.glob("*/metrics.jsonl")) - before
    if done.returncode or len(found) != 1:
        raise SystemExit(f"muster run ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    rows = [json.loads(line) for line in found.pop().read_text().splitlines()]
    began = rows[0]["time"] - rows[0]["step_s"]
    recent = [sum(row["loss"] for row in rows[at - RECENT : at]) / RECENT for at in range(RECENT, len(rows) + 1)]
    at = next((place for place, loss in enumerate(recent) if loss < TARGET), None)
    reached = None if at is None else rows[at + RECENT - 1]
    staleness = [row["staleness"] for row in rows if "staleness" in row]
    return {
        "rate": (len(rows) - WARM_UP) / (rows[-1]["time"] - rows[WARM_UP - 1]["time"]),
        "steps": reached and reached["step"],
        "seconds": reached and reached["time"] - began,
        "staleness": sum(staleness) / len(staleness) if staleness else 0.0,
        "losses": [round(row["loss"], 4) for row in rows],
    }


def pace(box: Box, steps: int, repeats: int) -> dict[str, Any]:
    """Compare the modes in turns."""
    with tempfile.TemporaryDirectory(prefix="asynchronous-") as folder:
        modes = {mode: partial(train, box, mode, Path(folder), steps) for mode in ("asynchronous", "bucketed")}
        found = turns(modes, repeats)
    rates = {mode: [each["rate"] for each in runs] for mode, runs in found.items()}
    row = ratio_of(rates["asynchronous"], rates["bucketed"])
    for mode, runs in found.items():
        for run in runs:
            to_target = f"loss < {TARGET} at step {run['steps']}" if run["steps"] else f"loss never < {TARGET}"
            after = f" after {run['seconds']:.1f} s" if run["steps"] else ""
            print(f"{mode:<13} {run['rate']:.2f} steps/s  staleness {run['staleness']:.2f}  {to_target}{after}")
    print(f"steps per second, asynchronous / bucketed: {spread(row)}; reach >= {REACH}")
    return row | {"name": "pace", "reach": REACH, "reached": row["ratio"] >= REACH, "runs": found}


def count(servers: int) -> list[float]:
    """Return the payload bytes that each rank's node sends for STEPS steps of all workers."""
    model = nn.Linear(ELEMENTS, 1, bias=False)
    group = dist.new_group(backend="gloo")
    assert group is not None
    optimizer = AsynchronousOptimizer(model.parameters(), torch.optim.SGD, group, servers=servers, lr=0.1)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    dist.barrier()
    counter = WireCounter(["eth1"])
    counter.start()
    for _ in range(STEPS):
        optimizer.step()
    dist.barrier()  # a server still sends to workers whose last step ends later
    sent = torch.tensor([counter.sent()], dtype=torch.float64)
    every = [torch.empty_like(sent) for _ in range(NODES)]
    dist.all_gather(every, sent)
    optimizer.finish()
    return [float(each) for each in every]


def bytes_row(box: Box, servers: int) -> dict[str, Any]:
    """Compare counted bytes with the formula."""
    found = on_ranks(count, box, servers=servers)
    wanted = [STEPS * each for each in sent_bytes(ELEMENTS, 4, NODES, servers)]
    ratios = [one / other for one, other in zip(found, wanted, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return {"name": f"bytes, {servers} servers", "servers": servers, "ratio": worst, "ratios": ratios} | {
        "counted": found,
        "formula": wanted,
        "reached": abs(worst - 1) <= REACH_BYTES,
    }


def main() -> int:
    """Measure, compare, report."""
    parser = Options(__doc__, repeats=3, quick={"repeats": 1, "steps": 40})
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    with place(None, args.rate, NODES) as box:
        assert isinstance(box, Box)
        rows = [bytes_row(box, servers) for servers in (4, 2, 1)]
        cells = [[str(row["servers"]), *(f"{each:.4f}" for each in row["ratios"])] for row in rows]
        table(["servers", *(f"node{node}" for node in range(NODES))], cells)
        rows.append(pace(box, args.steps, args.repeats))
    return finish(args, "asynchronous", rows, rate=args.rate, pass_s=PASS_S)


if __name__ == "__main__":
    sys.exit(main())
