"""How long commands and ranks take to start, against the tools that people use instead; neither side is warm.

    cli       `muster --help` and `muster plan` against `torchrun --help`; and that neither imports torch
    ranks     from the command to the first all-reduce done, 8 ranks on one node, against torchrun: the same program
    script    8 ranks of a user's script that imports torch itself, until the last one's first all-reduce; CPU time too
    agents    agents over real ssh on every node of a box (64: `sudo muster box up --nodes 64`), until every one has
              answered, against as many bare `ssh NODE echo` at once; and our side's CPU time. An agent that has
              answered has imported no torch; its node's sshd, shell and Python run on this same machine
    thousand  1,000 nodes x 8 ranks (or --nodes 10000): planned, started, all reports in; a failure, until every node
              is told; the supervisor's peak memory, and its share of a core for heartbeats; status, why, list and
              logs on the run folder. The agents are a stub (thousand.py), everything on this side is the real thing
    submit    `muster submit --on slurm` in a box, beside a bare `sbatch` of an empty script; when it returns, the job
              is in the queue and a copy of Muster's code in its run folder; each is cancelled then

    .venv/bin/python benchmarks/starts.py [cli ranks script thousand] [--ranks 8] [--repeats 7] [--json FILE]
    sudo .venv/bin/python benchmarks/starts.py agents|submit --box NAME

torchrun starts each worker in a session of its own, Muster all ranks in one. Where the kernel schedules by session
(/proc/sys/kernel/sched_autogroup_enabled) and other work wants the cores, all our ranks together get the share of one
of torchrun's workers. On such a machine, --sessions starts each rank of `script` by setsid(1), so that
shares are equal.
"""

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from harness import CLOCKS, Options, Ran, by_clock, command, compare, finish, turns, verdict

from muster.jobs.basics.files import read_lines
from muster.jobs.machine import linux

if TYPE_CHECKING:
    from muster.jobs.hosts.hosts import HostSet

Row = dict[str, Any]
EXAMPLE = Path(__file__).parent.parent / "jobs" / "examples" / "vgg11.yaml"
MUSTER = [sys.executable, "-m", "muster"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CLI_REACH, RANKS_REACH, SCRIPT_REACH, SUBMIT_REACH_S = 0.25, 0.35, 0.95, 1.0
THOUSAND_REACH = {
    1000: {"joined_s": 5.0, "told_s": 1.0, "memory_mb": 300.0},
    10_000: {"joined_s": 25.0, "told_s": 1.5, "memory_mb": 700.0},
}  # by the number of nodes
AGENTS_REACH, AGENTS_REACH_S, AGENTS_REACH_CPU_MS = 2.5, 3.0, 15.0
SCRIPT = """import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
met = torch.ones(())
dist.all_reduce(met)
with open(f"{os.environ['MET']}/{dist.get_rank()}", "w") as file:
    file.write(f"{time.monotonic()} {met.item()}")
dist.destroy_process_group()
"""
EMPTY = "#!/bin/sh\n#SBATCH --nodes=4 --output=/dev/null\ntrue\n"


def seconds_of(ours: list[str], theirs: list[str], repeats: int, *, until: str = "") -> tuple[list[float], list[float]]:
    """Return the seconds of two commands in turns."""
    sides = {side: partial(command, argv, until=until) for side, argv in (("ours", ours), ("theirs", theirs))}
    times = turns(sides, repeats, warm_up=1)
    return [ran.seconds for ran in times["ours"]], [ran.seconds for ran in times["theirs"]]


def cli(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Compare the commands that start nothing."""
    rows = []
    for words in (["--help"], ["plan", str(EXAMPLE)]):
        ours = [*MUSTER, *words]
        trace = subprocess.run([ours[0], "-X", "importtime", *ours[1:]], capture_output=True, text=True, check=True)
        torch = any(line.rpartition("|")[2].strip() == "torch" for line in trace.stderr.splitlines())
        times = seconds_of(ours, [*TORCHRUN, "--help"], args.repeats)
        row = compare(f"muster {words[0]} / torchrun --help", *times, reach=CLI_REACH, imports_torch=torch)
        rows.append(row | {"reached": row["reached"] and not torch})
    return rows


def ranks(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Compare starts to rank 0's line; both sides run `collectives_bench`, operation hello."""
    job = folder / "start.yaml"
    job.write_text(f"name: start\nranks_per_node: {args.ranks}\nbench: {{operation: hello}}\n")
    ours = [*MUSTER, "run", str(job), "--runs", str(folder)]
    theirs = [*TORCHRUN, "--nproc_per_node", str(args.ranks), "--standalone", "-m", "muster.collectives_bench"]
    times = seconds_of(ours, theirs, args.repeats, until="rank 0 of")
    return [compare(f"start of {args.ranks} ranks / torchrun", *times, reach=RANKS_REACH)]


def script(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Compare starts of a user's script, by wall and by CPU time."""
    linux.adopt_orphans()
    path = folder / "meet.py"
    path.write_text(SCRIPT)
    python = f"[setsid, --wait, {sys.executable}]" if args.sessions else sys.executable
    ours = [*MUSTER, "run", "-n", str(args.ranks), "-x", "MET", "--runs", str(folder), "--set", f"python={python}"]
    theirs = [*TORCHRUN, "--nproc-per-node", str(args.ranks)]
    sides = {
        "ours": partial(meet, [*ours, str(path)], args.ranks),
        "theirs": partial(meet, [*theirs, str(path)], args.ranks),
    }
    times = turns(sides, args.repeats, warm_up=1)
    found = by_clock(times["ours"], times["theirs"])
    name = f"start of {args.ranks} ranks of a script that imports torch / torchrun"
    return [
        compare(f"{name}, {clock}", found[clock]["ours"], found[clock]["theirs"], reach=SCRIPT_REACH)
        for clock in CLOCKS
    ]


def meet(argv: Sequence[str], ranks: int) -> tuple[float, float]:
    """Run a command; return CPU seconds of all its processes, and wall seconds until the last rank's all-reduce.

    Raises:
        SystemExit: the command failed, or a rank did not meet all others.
    """
    with tempfile.TemporaryDirectory() as met:
        began = time.monotonic()
        ran = command(argv, env={"MET": met}, reap=True)
        lines = [(Path(met) / str(rank)).read_text().split() for rank in range(ranks)]
    if any(float(total) != ranks for _, total in lines):
        raise SystemExit(f"the ranks of {' '.join(argv)} did not all meet: {lines}")
    return ran.cpu_s, max(float(when) for when, _ in lines) - began


def thousand(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure a run of many nodes against a stub: its start, its heartbeats, a failure, and commands on its folder."""
    job, story = folder / "thousand.yaml", folder / "story.json"
    job.write_text(f"nodes: {args.nodes}\nranks_per_node: {args.ranks}\nbench: {{operation: hello}}\n")
    program, runs = str(Path(__file__).with_name("thousand.py")), f"{folder}/runs"
    argv = [sys.executable, program, "supervise", str(job), runs, str(args.nodes), str(args.ranks), str(story)]
    found: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        shutil.rmtree(runs, ignore_errors=True)
        said = json.loads(command(argv).out.splitlines()[-1])
        times, run = json.loads(story.read_text()), Path(said["run"])
        rows = [row for row in read_lines(run / "events.jsonl") if row["event"] in ("submitted", "joined", "ended")]
        at = {row["event"]: row["time"] for row in rows}
        measured = {"planned_s": said["planned_s"], "memory_mb": said["memory_mb"], "cores": times["cores"]}
        measured |= {"joined_s": said["planned_s"] + at["joined"] - at["submitted"]}
        measured |= {"told_s": times["told"] - times["failed"], "ended_s": at["ended"] - times["told"]}
        for rank in range(args.nodes * args.ranks):
            (run / f"attempt-000/rank-{rank:05d}.out").write_text(f"hello from {rank}\n")
        for view in (["status"], ["why"], ["list"], ["logs", "--rank", "0"], ["logs"]):
            words = [*MUSTER, *view, *([] if view[0] == "list" else [run.name]), "--runs", runs]
            measured[" ".join(view) + "_s"] = command(words).seconds
        for name, value in measured.items():
            found.setdefault(name, []).append(value)
    made = []
    for name, values in found.items():
        reach = THOUSAND_REACH.get(args.nodes, {}).get(name)
        middle = statistics.median(values)
        reached = reach is None or middle <= reach
        print(f"{args.nodes} nodes x {args.ranks} ranks: {name} {middle:.2f} {verdict(reached, reach)}", flush=True)
        made.append({"name": f"{args.nodes} nodes: {name}", "reached": reached, "reach": reach, "values": values})
    return made


def agents(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Compare starts of agents in a box with bare ssh."""
    from muster.cloudlab.box.hosts import box_hosts

    hosts = box_hosts(args.box)
    count = len(hosts.hosts)

    def ours() -> tuple[float, float]:
        before = cpu_s()
        seconds = asyncio.run(start_agents(hosts))
        return seconds, (cpu_s() - before) / count * 1e3

    times = turns({"ours": ours, "echoes": lambda: asyncio.run(echoes(hosts))}, args.repeats, warm_up=1)
    mine, cpu = zip(*times["ours"], strict=True)
    seconds, cpu_ms = statistics.median(mine), statistics.median(cpu)
    row = compare(f"{count} agents over ssh", mine, times["echoes"], reach=AGENTS_REACH, cpu_ms_a_host=cpu)
    print(f"  all ready after {seconds:.2f} s (reach {AGENTS_REACH_S:g})")
    print(f"  client CPU {cpu_ms:.1f} ms a host (reach {AGENTS_REACH_CPU_MS:g})")
    row["reached"] &= seconds <= AGENTS_REACH_S and cpu_ms <= AGENTS_REACH_CPU_MS
    return [row]


def cpu_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


async def start_agents(hosts: "HostSet") -> float:
    """Start one agent per host and return the seconds until all have answered."""
    from muster.jobs.spec.site import SshSettings
    from muster.launch.transports.ssh import Ssh
    from muster.launch.wire.messages import Bye

    answers: asyncio.Queue[Any] = asyncio.Queue()  # a channel, or why there is none
    gate = SimpleNamespace(connected=answers.put_nowait, failed=lambda node_rank, error: answers.put_nowait(error))
    settings, count = SshSettings(cheap_kex=True), len(hosts.hosts)
    transport = Ssh(hosts.hosts, hosts, settings, python=sys.executable, code=None, fanout=count)
    began = time.monotonic()
    await transport.start(gate)  # type: ignore[arg-type]
    channels = [await asyncio.wait_for(answers.get(), 60) for _ in range(count)]
    seconds = time.monotonic() - began
    assert not (failures := [each for each in channels if isinstance(each, Exception)]), failures
    for channel in channels:
        channel.post(Bye(0))
        channel.close()
    await transport.close(())
    return seconds


async def echoes(hosts: "HostSet") -> float:
    """Run `ssh HOST echo` on all hosts at once, and return the seconds until all have ended."""
    from muster.jobs.spec.site import SshSettings
    from muster.launch.transports.child import Child
    from muster.launch.transports.ssh_command import base_options

    options = [*hosts.ssh_options, *base_options(SshSettings(cheap_kex=True), port=None)]
    began = time.monotonic()
    children = [Child(["ssh", *options, host.name, "echo"], piped=False) for host in hosts.hosts]
    codes = await asyncio.gather(*(child.ended for child in children))
    assert set(codes) == {0}, codes
    return time.monotonic() - began


def submit(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure submissions in a box."""
    from muster.cloudlab.box.hosts import box_hosts

    environment = box_hosts(args.box).environment
    job, empty = folder / "job.yaml", folder / "empty.sh"
    job.write_text("nodes: 4\nbench: {operation: hello}\n")
    empty.write_text(EMPTY)
    ours = [*MUSTER, "submit", str(job), "--runs", f"{folder}/runs", "--parsable"]
    ours += ["--hosts", f"box:{args.box}", "--on", "slurm"]

    def submitted(argv: list[str]) -> Ran:
        ran = command(argv, env=environment)
        for state in ("PENDING", "RUNNING"):
            command(["scancel", "--full", f"--state={state}"], env=environment)
        return ran

    sides = {"ours": partial(submitted, ours), "sbatch": partial(submitted, ["sbatch", str(empty)])}
    times = turns(sides, args.repeats, warm_up=1)
    # Slurm's epilogs write into the run folders until all jobs have ended.
    command(["timeout", "120", "sh", "-c", "while squeue --noheader | grep -q .; do sleep 0.2; done"], env=environment)
    mine, bare = ([ran.seconds for ran in times[side]] for side in sides)
    seconds, other = statistics.median(mine), statistics.median(bare)
    reached = seconds <= SUBMIT_REACH_S
    print(f"muster submit: {seconds:.3f} s, {verdict(reached, SUBMIT_REACH_S)}; a bare sbatch {other:.3f} s")
    return [{"name": "muster submit", "reached": reached, "reach": SUBMIT_REACH_S, "ours": mine, "sbatch": bare}]


ROWS = {"cli": cli, "ranks": ranks, "script": script, "thousand": thousand, "agents": agents, "submit": submit}


def main() -> int:
    """Measure and report the rows that were asked for."""
    parser = Options(__doc__, repeats=7, quick={"repeats": 1})
    parser.add_argument("what", nargs="*", choices=[*ROWS, "all"], default="all", help="default: all that need no box")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=1000, help="of `thousand`")
    parser.add_argument("--sessions", action="store_true", help="a session for each of our ranks of `script`")
    parser.add_argument("--box", default="box", help="the name of a box that is up, with Slurm for `submit`")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cli", "ranks", "script", "thousand") if "all" in args.what else args.what:
            rows += ROWS[name](args, Path(folder))
    return finish(args, "starts", rows)


if __name__ == "__main__":
    sys.exit(main())
