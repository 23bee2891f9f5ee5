"""1,000 nodes x 8 ranks: planned, rendered, started, all reports in. How long, and how much memory.

The agents are a stub: one process with a thousand connections that speaks their protocol (thousand_stub.py); everything
on this side is the real thing, from the job file to the verdict. The time includes the start of Python.

    .venv/bin/python benchmarks/thousand_nodes.py [--nodes 1000] [--ranks 8] [--repeats 3]
"""

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import Options, command, finish

REACH_S, REACH_MB = 5.0, 300.0
STUB = Path(__file__).with_name("thousand_stub.py")


def supervise(job: str, runs: str, nodes: int, ranks: int) -> int:
    """Run the job against the stub, in this process."""
    from muster.launch.commands import run
    from muster.launch.common.fingerprint import fingerprint
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.start import write_run
    from muster.launch.supervision.console import Console
    from muster.launch.supervision.supervisor import Supervisor
    from muster.launch.transports.dialled import Dialled, Starter

    parser = argparse.ArgumentParser()
    run.configure(parser)
    args = parser.parse_args([job, "--runs", runs, "-w", f"stub[0000-{nodes - 1:04d}]", "--on", "pdsh"])
    prepared = prepare(args)
    write_run(prepared)

    def argv(connect: str) -> list[str]:
        return [sys.executable, str(STUB), connect, str(nodes), str(ranks), fingerprint()]

    transport = Dialled("stub", nodes, run=prepared.context.run, starter=Starter(argv=argv), towards="127.0.0.1")
    context = replace(prepared.context, remote=True)
    code = asyncio.run(Supervisor(context, transport, Console(quiet=True)).run()).code
    print(json.dumps({"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
    return code


def main() -> int:
    """Measure, report."""
    parser = Options(__doc__, repeats=3, quick={"repeats": 1})
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--supervise", nargs=2, metavar=("JOB", "RUNS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.supervise:
        return supervise(*args.supervise, args.nodes, args.ranks)
    seconds, memories = [], []
    with tempfile.TemporaryDirectory() as text:
        job = Path(text, "job.yaml")
        job.write_text(f"nodes: {args.nodes}\nranks_per_node: {args.ranks}\nbench: {{operation: hello}}\n")
        argv = [sys.executable, __file__, "--nodes", str(args.nodes), "--ranks", str(args.ranks)]
        for _ in range(args.repeats):
            ran = command([*argv, "--supervise", str(job), f"{text}/runs"])
            seconds.append(ran.seconds)
            memories.append(json.loads(ran.out)["memory_mb"])
            print(f"{len(seconds):>3}  {seconds[-1]:.2f} s  {memories[-1]:.0f} MB", flush=True)
    second, memory = statistics.median(seconds), max(memories)
    print(f"{args.nodes} nodes x {args.ranks} ranks: {second:.2f} s (reach {REACH_S:g}), ", end="")
    print(f"{memory:.0f} MB (reach {REACH_MB:g})")
    reached = second <= REACH_S and memory <= REACH_MB
    row = {"name": "all reports in", "reached": reached, "seconds": seconds, "memory_mb": memories}
    return finish(args, "a thousand nodes", [row], nodes=args.nodes, ranks=args.ranks)


if __name__ == "__main__":
    sys.exit(main())
