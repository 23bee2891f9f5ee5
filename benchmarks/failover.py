"""How soon a failure is noticed and a run goes on.

    restart    kill -9 of one of four CPU ranks, to the first new step, beside `torchrun --max-restarts` with the same
               model; both save every 20 steps and are hit between saves, and the time ends when the first step after
               the restart is done (ours: the supervisor's event `first_step`)
    told       the first rank's failure on four nodes, to the moment at which every other rank has been told to stop
    lost       the power of one of four nodes is cut, to the first new step on the other three (`min_nodes: 3`)

    .venv/bin/python benchmarks/failover.py restart [--repeats 5] [--json FILE]
    sudo .venv/bin/python benchmarks/failover.py told|lost --box NAME [--on ssh|pdsh] [--how power|unplug|freeze|kill]

The nodes of a box share this machine's clock, so the times that ranks write down can be compared. What the time of
`lost` went to is read from attempts.jsonl. Recorded for comparison with it, not measured here: torchrun needs 45.7 s,
plain gloo 933 s, Slurm alone 300 s.
torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, torch 2.13 leaves the dead attempt's addresses in the
store that all attempts share, and the restarted ranks refuse to connect.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from faults.bench import Bench
from faults.live import box, wait_for
from faults.nodes import FOUR, NODE
from faults.work import job
from harness import Options, compare, finish, turns, verdict

RANKS, HIT, AT_STEP, EVERY = 4, 2, 45, 20
TRAIN = {"mode": "ddp", "exact": False, "virtual_ranks": None}
JOB = job(nodes=1, ranks=RANKS, steps=100_000, every=EVERY, train=TRAIN)
PEER = Path(__file__).with_name("restart_peer.py")
REACH_S = {"restart": 1.5, "told": 1.0, "lost": 15.0}
RECORDED_S = {"torchrun": 45.7, "gloo": 933.0, "slurm": 300.0}
PARTS = ("detect_s", "stop_s", "start_s", "load_s", "replay_s")
# Rank 2 notes the time and exits with 3; every other rank notes when SIGTERM reaches it.
PROGRAM = """
import os, signal, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]

def note(*_):
    with open(f"{folder}/{rank}.time", "w") as file:
        file.write(repr(time.time()))
    os._exit(3 if rank == "2" else 0)

signal.signal(signal.SIGTERM, note)
open(f"{folder}/{rank}.ready", "w").close()
ranks = int(os.environ["WORLD_SIZE"])
while rank == "2" and sum(name.endswith("ready") for name in os.listdir(folder)) < ranks:
    time.sleep(0.01)
if rank == "2":
    note()
time.sleep(1000)
"""


def restart(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Compare both sides of a restart."""
    sides = {"ours": partial(muster_once, bench), "theirs": partial(torchrun_once, bench)}
    times = turns(sides, args.repeats, warm_up=1)
    row = compare("restart after kill -9 of one rank of 4", times["ours"], times["theirs"], reach=1.0)
    median = statistics.median(times["ours"])
    row |= {"reach_s": REACH_S["restart"], "reached": median <= REACH_S["restart"]}
    print(f"kill to the first new step: {median:.2f} s, {verdict(row['reached'], row['reach_s'])}")
    return row


def muster_once(bench: Bench) -> float:
    """Return the seconds of one restart of Muster's."""
    live = bench.start(JOB)
    try:
        live.wait_step(AT_STEP)
        pid = live.ranks()[HIT]
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        return float(live.wait_event("first_step", attempt=1)["time"]) - began
    finally:
        live.kill()


def torchrun_once(bench: Bench) -> float:
    """Return the seconds of one restart of torchrun's."""
    folder = bench.place()
    argv = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", str(RANKS)]
    argv += ["--max-restarts", "3", str(PEER), str(folder), "100000", str(EVERY)]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def steps() -> list[list[str]]:
        path = folder / "steps"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if len(row) == 3]  # restart, step, time

    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=said, env=env, start_new_session=True)
    try:
        wait_for("torchrun's steps", lambda: any(int(step) >= AT_STEP for _, step, _ in steps()))
        pid = int((folder / f"pid-{HIT}-0").read_text())
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        new = wait_for("torchrun's restart", lambda: [float(when) for restart, _, when in steps() if restart == "1"])
        return new[0] - began
    finally:
        process.terminate()
        process.wait(60)


def told(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Measure from a failure to the last rank's SIGTERM."""
    seconds = []
    for _ in range(args.repeats):
        folder = bench.place()
        command = json.dumps([sys.executable, "-c", PROGRAM, str(folder)])
        text = f"nodes: 4\nranks_per_node: 2\ncommand: {command}\n"
        live = bench.start(text, "--hosts", f"box:{bench.box}", "--on", args.on)
        code = live.end(120.0)
        assert code == 3, live.last_words()
        times = {int(path.stem): float(path.read_text()) for path in folder.glob("*.time")}
        assert sorted(times) == list(range(8)), times
        seconds.append(max(times.values()) - times[2])
    return slowest_of("told", seconds, on=args.on)


def lost(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Measure from a node's failure to the first new step, and the parts of the time lost."""
    rows = [lost_once(bench, args.how) for _ in range(args.repeats)]
    parts = {part: statistics.median(row[part] for row in rows) for part in PARTS}
    print(", ".join(f"{part.removesuffix('_s')} {seconds:.2f} s" for part, seconds in parts.items()))
    print(f"recorded elsewhere: {', '.join(f'{name} {seconds:g} s' for name, seconds in RECORDED_S.items())}")
    return slowest_of("lost", [row["seconds"] for row in rows], how=args.how, rows=rows, **RECORDED_S)


def lost_once(bench: Bench, how: str) -> dict[str, float]:
    """Return the seconds to the first new step, and the parts of the time lost."""
    live = bench.start_in_box(FOUR)
    try:
        live.wait_step(24)
        began = time.time()
        box("fail", NODE, "--how", how, "--name", bench.box)
        first = live.wait_event("first_step", attempt=1)
        code = live.end()
        assert code == 0, live.last_words()
        old, new = live.attempts()
        assert new["world_size"] == 3, new
        times = old["times"] | new["times"]
        return {"seconds": first["time"] - began, **{part: times.get(part, 0.0) for part in PARTS}}
    finally:
        live.kill()
        box("heal", NODE, "--name", bench.box)


def slowest_of(name: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    """Print the median and the slowest, which has to be in reach; return the row."""
    reached = max(seconds) <= REACH_S[name]
    median = statistics.median(seconds)
    print(f"{name}: {median:.3f} s (median), {max(seconds):.3f} s (slowest) {verdict(reached, REACH_S[name])}")
    return {"name": name, "reached": reached, "reach": REACH_S[name], "seconds": seconds, **more}


ROWS = {"restart": restart, "told": told, "lost": lost}


def main() -> int:
    """Measure and report one row."""
    parser = Options(__doc__, repeats=5, quick={"repeats": 1})
    parser.add_argument("what", choices=ROWS)
    parser.add_argument("--box", default="box", help="the name of a box that is up")
    parser.add_argument("--on", choices=["ssh", "pdsh"], default="ssh", help="the transport of `told`")
    parser.add_argument("--how", choices=["power", "unplug", "freeze", "kill"], default="power", help="of `lost`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        row = ROWS[args.what](Bench(Path(text), box=args.box), args)
    return finish(args, "failover", [row])


if __name__ == "__main__":
    sys.exit(main())
