"""`muster --help` and `muster plan` against `torchrun --help`; and that neither imports torch.

.venv/bin/python benchmarks/cli_start.py [--repeats 15]
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from pairs import interleaved, report

EXAMPLE = Path(__file__).parent.parent / "jobs" / "examples" / "vgg11.yaml"


def seconds(argv: list[str]) -> float:
    """Time one command from start to end."""
    started = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def imports_torch(argv: list[str]) -> bool:
    """Say whether a Python command imports torch, by the interpreter's own trace."""
    trace = subprocess.run([argv[0], "-X", "importtime", *argv[1:]], capture_output=True, text=True, check=True).stderr
    return any(line.rpartition("|")[2].strip() == "torch" for line in trace.splitlines())


def main() -> int:
    """Measure and report both commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    python = sys.executable
    theirs = [python, "-m", "torch.distributed.run", "--help"]
    well = True
    for words in (["--help"], ["plan", str(EXAMPLE)]):
        ours = [python, "-m", "muster", *words]
        torch = imports_torch(ours)
        mine, others = interleaved(lambda argv=ours: seconds(argv), lambda: seconds(theirs), args.repeats)
        well &= report(f"muster {words[0]} / torchrun --help", mine, others, reach=0.25, imports_torch=torch)
        well &= not torch
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
