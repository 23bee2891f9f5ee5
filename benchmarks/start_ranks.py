"""Start of 8 ranks on one node, from the command to the first all-reduce done, against torchrun.

Both run the same program (`collectives_bench`, operation hello); the clock stops when rank 0's line comes out of the
command's standard output.

    .venv/bin/python benchmarks/start_ranks.py [--ranks 8] [--repeats 7]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pairs import interleaved, report

JOB = "name: start\nranks_per_node: {ranks}\nbench: {{operation: hello}}\n"


def first_all_reduce(argv: list[str]) -> float:
    """Return seconds from the start of a command to rank 0's line; the command must end well."""
    started = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    seconds = 0.0
    for line in process.stdout:
        if line.startswith("rank 0 of"):
            seconds = time.perf_counter() - started
    if process.wait() != 0 or not seconds:
        raise SystemExit(f"{argv[:4]} ended with {process.returncode} and {'no' if not seconds else 'a'} result")
    return seconds


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "start.yaml"
        job.write_text(JOB.format(ranks=args.ranks))
        python = sys.executable
        ours = [python, "-m", "muster", "run", str(job), "--runs", folder]
        theirs = [python, "-m", "torch.distributed.run", "--nproc_per_node", str(args.ranks), "--standalone"]
        theirs += ["-m", "muster.collectives_bench"]
        mine, others = interleaved(lambda: first_all_reduce(ours), lambda: first_all_reduce(theirs), args.repeats)
    return 0 if report(f"start of {args.ranks} ranks / torchrun", mine, others, reach=0.35) else 1


if __name__ == "__main__":
    sys.exit(main())
