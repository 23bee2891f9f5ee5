"""A run by hand of 4 nodes that starts, loses a rank, restarts and ends, while 2,000 connections lie on its port.

The connections hold still, send garbage, send lines without an end, or send a byte at a time, and are opened anew when
they are closed. Everything is on loopback, and bounded. Compared are runs with the flood and runs without: the seconds
until the ranks of the first attempt are started, the supervisor's peak memory, and what it prints.

    .venv/bin/python benchmarks/flood.py [--repeats 3] [--connections 2000] [--json FILE]
"""

import json
import os
import selectors
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness import Options, compare, finish, turns

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import list_runs

NODES, REACH, REACH_MIB, REACH_LINES = 4, 1.5, 100, 60
LOOPBACK = "127.0.0.1"
MOST_OPENED = 40_000  # in all, by one flood
LIMIT_S = 60.0
JOB = """
name: flood
nodes: 4
command: [python3, -c, "import os, sys, time; time.sleep(1);
  sys.exit(os.environ['RANK'] == '2' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"]
restart: {max: 1}
"""
KINDS = (b"", os.urandom(200) + b"\n", b"x" * 65_536, b'{"token": "\\ud800"}\n')


def flood(port: int, connections: int) -> None:
    """Keep so many connections open until the port is gone; the fifth kind sends a byte now and then."""
    selector, opened, slow = selectors.DefaultSelector(), 0, []
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and opened < MOST_OPENED:
        while len(selector.get_map()) < connections and opened < MOST_OPENED:
            try:
                connection = socket.create_connection((LOOPBACK, port), timeout=1.0)
                connection.setblocking(False)
                if opened % (len(KINDS) + 1) == len(KINDS):
                    slow.append(connection)
                else:
                    connection.send(KINDS[opened % len(KINDS)])
                selector.register(connection, selectors.EVENT_READ)
            except ConnectionRefusedError:
                if opened:
                    return  # the run is over
                time.sleep(0.02)
                continue
            except OSError:
                pass
            opened += 1
        for connection in slow[-50:]:
            try:
                connection.send(b"m")
            except OSError:
                slow.remove(connection)
        for key, _ in selector.select(0.01):
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]


class Outcome(NamedTuple):
    """What one run cost."""

    start_s: float
    peak_mib: float
    lines: int
    code: int


def run(connections: int) -> Outcome:
    """Do one run, with a flood of so many connections, or none."""
    with tempfile.TemporaryDirectory() as folder:
        return run_in(Path(folder), connections)


def run_in(folder: Path, connections: int) -> Outcome:
    """Do one run in an empty folder."""
    signal.alarm(int(2 * LIMIT_S))  # nothing here may wait for ever
    job, runs = folder / "job.yaml", folder / "runs"
    job.write_text(JOB)
    muster = module_argv(sys.executable, "muster.launch.cli")
    options = ["--master-addr", LOOPBACK, "--runs", str(runs), "--json"]
    printed = subprocess.run([*muster, "cmd", str(job), *options], check=True, capture_output=True, text=True)
    lines = [each["line"] for each in json.loads(printed.stdout)]
    words = shlex.split(lines[0])
    port = int(words[words.index("--port") + 1])
    flooding = os.fork() if connections else 0
    if connections and flooding == 0:
        flood(port, connections)
        os._exit(0)
    began = time.time()
    with tempfile.TemporaryFile() as said:
        # A line begins with `cd FOLDER && VARIABLE=…`; exec: the process that we start is the supervisor.
        line = lines[0].replace("&& ", "&& exec env ", 1)
        supervisor = subprocess.Popen(["sh", "-c", line], stderr=said, stdout=subprocess.DEVNULL)
        agents = [subprocess.Popen(["sh", "-c", f"exec env {each}"], stderr=subprocess.DEVNULL) for each in lines[1:]]
        _, status, usage = os.wait4(supervisor.pid, 0)
        supervisor.returncode = os.waitstatus_to_exitcode(status)
        for agent in agents:
            agent.wait(20)
        said.seek(0)
        text = said.read()
    if flooding:
        os.waitpid(flooding, 0)
    (made,) = list_runs(runs)
    started = [row["time"] for row in read_lines(made.events) if row["event"] == "started" and row["attempt"] == 0]
    if supervisor.returncode:
        print(text.decode(errors="replace"), file=sys.stderr)
    return Outcome(max(started) - began, usage.ru_maxrss / 1024, text.count(b"\n"), supervisor.returncode)


def main() -> int:
    """Measure, report."""
    parser = Options(__doc__, repeats=3, quick={"repeats": 1, "connections": 200})
    parser.add_argument("--connections", type=int, default=2000)
    args = parser.parse_args()
    sides = {"flooded": lambda: run(args.connections), "calm": lambda: run(0)}
    found = turns(sides, args.repeats, warm_up=1)
    flooded, calm = found["flooded"], found["calm"]
    codes = [each.code for each in flooded + calm]
    more_mib = max(each.peak_mib for each in flooded) - statistics.median(each.peak_mib for each in calm)
    lines = max(each.lines for each in flooded)
    times = ([each.start_s for each in side] for side in (flooded, calm))
    row = compare("start of a flooded run", *times, reach=REACH, codes=codes, mib=more_mib, lines=lines)
    print(f"  exit codes {codes} (reach: all 0)")
    print(f"  memory {more_mib:+.0f} MiB (reach {REACH_MIB}), {lines} lines printed (reach {REACH_LINES})")
    row["reached"] &= not any(codes) and more_mib <= REACH_MIB and lines <= REACH_LINES
    return finish(args, "flood", [row])


if __name__ == "__main__":
    sys.exit(main())
