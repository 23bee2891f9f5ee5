"""How soon a failure is noticed and a run goes on.

    restart    kill -9 of one of four CPU ranks, to the first new step, beside `torchrun --max-restarts` with the same
               model; both save every 20 steps and are hit between saves, and the time ends when the first step after
               the restart is done (ours: the supervisor's event `first_step`)
    in_place   kill -9 of one of four CPU ranks, to the next step of the other three, in turns: in place, with a
               restart, and by torchft in the folder --torchft (limit for a silent replica: 5 s, its default, and 0.5 s)
    join       how long three ranks stand still when the fourth joins them, in steps
    told       the first rank's failure on four nodes, to the moment at which every other rank has been told to stop
    lost       the power of one of four nodes is cut, to the first new step on the other three (`min_nodes: 3`), with a
               restart or, with --in-place, in place

    .venv/bin/python benchmarks/failover.py restart|in_place|join [--repeats 5] [--json FILE]
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
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from faults.bench import Bench
from faults.live import box, wait_for
from faults.nodes import NODE
from faults.work import job
from harness import Options, compare, finish, turns, verdict

from muster.jobs.basics.files import read_lines

RANKS, HIT, AT_STEP, EVERY = 4, 2, 45, 20
LOST_STEPS = 60  # the node is lost after 24; every further step costs time that is not measured
TRAIN = {"mode": "ddp", "exact": False, "virtual_ranks": None}
JOB = job(nodes=1, ranks=RANKS, steps=100_000, every=EVERY, train=TRAIN)
PEER = Path(__file__).with_name("restart_peer.py")
REACH_S = {"restart": 1.5, "in_place": 0.2, "join": 1.5, "told": 1.0, "lost": 15.0, "lost_in_place": 6.0}
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


def muster_once(bench: Bench, text: str = JOB) -> float:
    """Return the seconds from a killed rank to the first step of Muster's next attempt."""
    live = bench.start(text)
    try:
        live.wait_step(AT_STEP)
        pid = live.ranks()[HIT]
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        return float(live.wait_event("first_step", attempt=1)["time"]) - began
    finally:
        live.kill()


LEFT = [rank for rank in range(RANKS) if rank != HIT]
IN_PLACE = {"max": 50, "in_place": "auto"}
JOIN_MODEL = {"d_model": 128, "d_ff": 512, "layers": 4, "heads": 4, "context": 64, "dropout": 0.1}


def in_place(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the next step of the survivors with a restart, and with torchft."""
    ours = job(nodes=1, ranks=RANKS, steps=100_000, every=EVERY, train=TRAIN, restart=IN_PLACE)
    sides = {"in_place": partial(muster_once, bench, ours), "restart": partial(muster_once, bench)}
    if args.torchft:
        sides |= {"torchft": partial(torchft_once, bench, args.torchft, 5000, 100)}  # its defaults
        sides |= {"torchft_short": partial(torchft_once, bench, args.torchft, 500, 20)}
    times = turns(sides, args.repeats, warm_up=1)
    medians = {side: round(statistics.median(each), 3) for side, each in times.items()}
    print("kill to the next step: " + ", ".join(f"{side} {seconds:.3f} s" for side, seconds in medians.items()))
    reached = medians["in_place"] <= REACH_S["in_place"]
    return {"name": "in place", "reached": reached, "reach": REACH_S["in_place"], "times": times, "medians": medians}


def torchft_once(bench: Bench, site: str, silent_ms: int, tick_ms: int) -> float:
    """Return the seconds until the replicas that are left have committed a step."""
    sys.path.append(site)
    from torchft.coordination import LighthouseServer

    folder = bench.place()
    limits = {"join_timeout_ms": 100, "quorum_tick_ms": tick_ms, "heartbeat_timeout_ms": silent_ms}
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **limits)
    argv = [sys.executable, str(PEER.with_name("torchft_peer.py")), str(folder)]
    here = lighthouse.address()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": site}

    def steps(ranks: Sequence[int] = (0,)) -> list[list[str]]:
        paths = [path for rank in ranks if (path := folder / f"steps-{rank}").exists()]
        rows = [line.split() for path in paths for line in path.read_text().splitlines()]
        return [row for row in rows if len(row) == 3]  # step, replicas, time

    with (folder / "said.txt").open("wb") as said:
        replicas = [
            subprocess.Popen([*argv, str(rank), str(RANKS), here], stdout=said, stderr=said, env=env)
            for rank in range(RANKS)
        ]
    try:
        full = lambda: [int(step) for step, count, _ in steps() if int(count) == RANKS][AT_STEP:]  # noqa: E731
        wait_for("torchft's steps", full)
        began = time.time()
        replicas[HIT].kill()
        new = wait_for(
            "torchft's next step",
            lambda: [float(when) for _, n, when in steps(LEFT) if int(n) < RANKS and float(when) > began],
        )
        return min(new) - began
    finally:
        for each in replicas:
            each.kill()
            each.wait()
        lighthouse.shutdown()


def join(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time between the last step of three ranks and the first one of four, in steps of the three."""
    train = {**TRAIN, "model": JOIN_MODEL, "batch_size": 24, "log_every": 1}
    text = job(nodes=1, ranks=RANKS, steps=100_000, every=100_000, train=train, restart=IN_PLACE)
    rows = [join_once(bench, text) for _ in range(args.repeats)]
    still = [row["still_steps"] for row in rows]
    median = statistics.median(still)
    print(f"stand still: {median:.2f} steps of {statistics.median(row['step_s'] for row in rows):.3f} s")
    return {"name": "join", "reached": median <= REACH_S["join"], "reach": REACH_S["join"], "rows": rows}


def join_once(bench: Bench, text: str) -> dict[str, float]:
    """Return the steps for which the ranks stood still, and the seconds of a step before."""
    live = bench.start(text)
    try:
        live.wait_step(6)
        os.kill(live.ranks()[HIT], signal.SIGKILL)
        live.wait_event("first_step", attempt=2)
        live.wait(
            "two steps of four ranks", lambda: sum(row["attempt"] == 2 for row in read_lines(live.run.metrics)) > 1
        )
        rows = list(read_lines(live.run.metrics))
    finally:
        live.kill()
    three = [row["time"] for row in rows if row["attempt"] == 1]
    four = [row["time"] for row in rows if row["attempt"] == 2]
    step_s = statistics.median(late - early for early, late in pairwise(three))
    return {"still_steps": (four[0] - three[-1]) / step_s - 1, "step_s": step_s}


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
    in_place: dict[str, Any] = {"in_place": "auto"} if args.in_place else {}
    text = job(nodes=4, steps=LOST_STEPS, train={"virtual_ranks": 12}, restart={"min_nodes": 3, **in_place})
    rows = [lost_once(bench, args.how, text) for _ in range(args.repeats)]
    print(f"steps redone: {[row['redone'] for row in rows]}")
    parts = {part: statistics.median(row[part] for row in rows) for part in PARTS}
    print(", ".join(f"{part.removesuffix('_s')} {seconds:.2f} s" for part, seconds in parts.items()))
    print(f"recorded elsewhere: {', '.join(f'{name} {seconds:g} s' for name, seconds in RECORDED_S.items())}")
    what = "lost_in_place" if args.in_place else "lost"
    return slowest_of(what, [row["seconds"] for row in rows], how=args.how, rows=rows, **RECORDED_S)


def lost_once(bench: Bench, how: str, text: str) -> dict[str, float]:
    """Return the seconds to the first new step, the steps done again, and the parts of the time lost."""
    box("heal", NODE, "--name", bench.box)  # a run that was killed may have left it without power
    live = bench.start_in_box(text)
    try:
        live.wait_step(24)
        began = time.time()
        box("fail", NODE, "--how", how, "--name", bench.box)
        first = live.wait_event("first_step", attempt=1)
        code = live.end()
        assert code == 0, live.last_words()
        old, new = live.attempts()[:2]
        assert (old["world_size"], new["world_size"]) == (4, 3), (old, new)
        times = old["times"] | new["times"]
        redone = old["last_step"] - new["from_step"]
        return {"seconds": first["time"] - began, "redone": redone, **{part: times.get(part, 0.0) for part in PARTS}}
    finally:
        live.kill()
        box("heal", NODE, "--name", bench.box)


def slowest_of(name: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    """Print the median and the slowest, which has to be in reach; return the row."""
    reached = max(seconds) <= REACH_S[name]
    median = statistics.median(seconds)
    print(f"{name}: {median:.3f} s (median), {max(seconds):.3f} s (slowest) {verdict(reached, REACH_S[name])}")
    return {"name": name, "reached": reached, "reach": REACH_S[name], "seconds": seconds, **more}


ROWS = {"restart": restart, "in_place": in_place, "join": join, "told": told, "lost": lost}


def main() -> int:
    """Measure and report one row."""
    parser = Options(__doc__, repeats=5, quick={"repeats": 1})
    parser.add_argument("what", choices=ROWS)
    parser.add_argument("--box", default="box", help="the name of a box that is up")
    parser.add_argument("--on", choices=["ssh", "pdsh"], default="ssh", help="the transport of `told`")
    parser.add_argument("--how", choices=["power", "unplug", "freeze", "kill"], default="power", help="of `lost`")
    parser.add_argument("--in-place", action="store_true", help="the other nodes continue in place; of `lost`")
    parser.add_argument("--torchft", help="a folder with torchft, for `in_place`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        row = ROWS[args.what](Bench(Path(text), box=args.box), args)
    return finish(args, "failover", [row])


if __name__ == "__main__":
    sys.exit(main())
