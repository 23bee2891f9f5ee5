"""How much of a core `muster watch` takes of a run of 1,000 ranks whose files grow.

A made run folder: 125 nodes of 8 ranks at work, one of them 20 % slower. A process appends to every rank's metrics
twice a second, to the run's metrics, and rewrites progress.json each second, as ranks and supervisor do. `muster watch`
draws it in a terminal of 120 columns and 40 lines. What counts is its processor time (user and system) by the wall
time, after the first `--settle` seconds: starting takes as long as any command.

    .venv/bin/python benchmarks/watch_ranks.py [--ranks 1000] [--seconds 40] [--quick]
"""

import fcntl
import json
import os
import pty
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from harness import Options, finish, table, verdict

from muster.jobs.basics.files import append_line, append_lines, write_bytes
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.processes import start_ticks

PER_NODE = 8
STEP_S = 0.1
SLOWER = 1.2
REACH = 0.05
SIZE = (40, 120)
TICKS = os.sysconf("SC_CLK_TCK")


class MadeRun:
    """A run folder as a supervisor and its ranks leave it while they go on; this process is the supervisor."""

    def __init__(self, root: Path, ranks: int, slow: int) -> None:
        self.run = RunDir(root / "made-20260101T000000Z-000001")
        self.ranks, self.slow, self.step = ranks, slow, 0
        self.chance = random.Random(1)
        self.run.attempt(0).path.mkdir(parents=True)
        nodes = -(-ranks // PER_NODE)
        self.of_node = [range(at * PER_NODE, min(ranks, (at + 1) * PER_NODE)) for at in range(nodes)]
        self.run.job.write_text(f"nodes: {nodes}\nranks_per_node: {PER_NODE}\ncheckpoint: {{every_steps: 500}}\n" + JOB)
        hosts = [f"node{at:04d}" for at in range(nodes)]
        common = {"world_size": ranks, "nodes": nodes, "attempt": 0}
        me = {"host": socket.gethostname(), "pid": os.getpid(), "pid_start": start_ticks(os.getpid())}
        self.event("submitted", name="made", kind="train", transport="ssh", **common, **me)
        self.event("attempt", hosts=hosts, **common)
        for at, members in enumerate(self.of_node):
            told = {"ranks": [[each, each + 2] for each in members], "ticks": [[each, 1] for each in members]}
            self.event("started", attempt=0, node=at, host=hosts[at], **told)
        self.event("joined", attempt=0)

    def event(self, event: str, /, **fields: Any) -> None:
        append_line(self.run.events, {"time": time.time(), "event": event, **fields})

    def train(self, steps: int) -> None:
        """Do some steps: every rank writes its rows, rank 0 the run's, the supervisor its file."""
        for rank in range(self.ranks):
            append_lines(self.run.attempt(0).metrics(rank), [self.row(rank, at) for at in self.numbers(steps)])
        append_lines(self.run.metrics, [self.row(0, at) for at in self.numbers(steps)])
        self.step += steps
        nodes = [
            {"node": at, "host": f"node{at:04d}", "heard_s": 0.4, "ranks": [[r, "run", self.step, 0.3, ""] for r in of]}
            for at, of in enumerate(self.of_node)
        ]
        told = {"time": time.time(), "attempt": 0, "nodes": nodes}
        write_bytes(self.run.progress, json.dumps(told).encode(), mode=0o600)

    def numbers(self, steps: int) -> range:
        return range(self.step + 1, self.step + 1 + steps)

    def row(self, rank: int, step: int) -> dict[str, Any]:
        work_s = 0.6 * STEP_S * (SLOWER if rank == self.slow else 1.0) * self.chance.uniform(0.97, 1.03)
        parts = {"data_s": 1e-4, "forward_s": work_s / 3, "backward_s": work_s / 1.5, "optimizer_s": 1e-3}
        return {
            "step": step, "steps": 100000, "epoch": 1, "attempt": 0, "rank": rank, "loss": 2.3025851249694824,
            "lr": 0.01, "time": round(time.time(), 6), "step_s": STEP_S, **parts,
            "communication_s": STEP_S - sum(parts.values()), "rate": 32 / STEP_S, "unit": "samples/s",
        }  # fmt: skip


JOB = "train: {model: vgg11, data: digits, mode: ddp, batch_size: 32000, epochs: 100}\n"


def grow(made: MadeRun) -> int:
    """Start the process that goes on writing; return its pid."""
    pid = os.fork()
    if pid == 0:
        while True:
            began = time.monotonic()
            made.train(5)
            time.sleep(max(0.0, began + 5 * STEP_S - time.monotonic()))
    return pid


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def drain(leader: int, seconds: float) -> bytes:
    """Read what a terminal is sent for so long."""
    data, until = b"", time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        if select.select([leader], [], [], left_s)[0]:
            try:
                data += os.read(leader, 1 << 16)
            except OSError:  # the last process that had the terminal open has closed it
                break
    return data


def watch(root: Path, settle_s: float, seconds: float) -> tuple[float, float, bytes]:
    """Watch the newest run in a terminal; return processor time and wall time, and what was drawn."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    argv = [sys.executable, "-m", "muster", "watch", "--runs", str(root)]
    process = subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    drain(leader, settle_s)
    began, began_cpu = time.monotonic(), cpu_s(process.pid)
    drawn = drain(leader, seconds)
    cpu, wall = cpu_s(process.pid) - began_cpu, time.monotonic() - began
    os.write(leader, b"q")
    drawn += drain(leader, 1.0)
    process.wait(timeout=10)
    os.close(leader)
    return cpu, wall, drawn


def main() -> int:
    parser = Options(__doc__, quick={"ranks": 100, "seconds": 5.0, "settle": 3.0})
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--settle", type=float, default=20.0, help="as long as every rank's file takes to be read once")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = MadeRun(Path(folder), args.ranks, slow=args.ranks // 3)
        made.train(30)
        writer = grow(made)
        try:
            cpu, wall, drawn = watch(Path(folder), args.settle, args.seconds)
        finally:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
    share, frames = cpu / wall, drawn.count(b"submitted")
    reached = share <= REACH and b"1 slow" in drawn
    cells = [str(args.ranks), f"{cpu:.2f}", f"{wall:.1f}", str(frames), f"{share:.1%}", verdict(reached, REACH)]
    table(("ranks", "cpu s", "wall s", "frames", "of a core", "reach"), [cells])
    row = {"ranks": args.ranks, "cpu_s": cpu, "wall_s": wall, "frames": frames, "share": share, "reached": reached}
    return finish(args, "watch_ranks", [row], reach=REACH)


if __name__ == "__main__":
    sys.exit(main())
