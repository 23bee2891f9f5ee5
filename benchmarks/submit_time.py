"""`muster submit JOB --on slurm` in a box: from the command to its return, beside a bare `sbatch` of an empty script.

When the command returns, the job is in the queue and a copy of Muster's code in its run folder. Each is cancelled then.

    sudo .venv/bin/python benchmarks/submit_time.py [--box NAME] [--repeats 7]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pairs import interleaved

from muster.cloudlab.box.hosts import box_hosts

REACH_S = 1.0
JOB = "nodes: 4\nbench: {operation: hello}\n"
EMPTY = "#!/bin/sh\n#SBATCH --nodes=4 --output=/dev/null\ntrue\n"


def main() -> int:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--box", default="box", help="the name of a box with Slurm that is up")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    environment = {**os.environ, **box_hosts(args.box).environment}
    with tempfile.TemporaryDirectory() as text:
        job, script = Path(text, "job.yaml"), Path(text, "empty.sh")
        job.write_text(JOB)
        script.write_text(EMPTY)
        ours = [sys.executable, "-m", "muster", "submit", str(job), "--runs", f"{text}/runs", "--parsable"]
        ours += ["--hosts", f"box:{args.box}", "--on", "slurm"]

        def timed(argv: list[str]) -> float:
            began = time.monotonic()
            subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, timeout=60, check=True)
            seconds = time.monotonic() - began
            subprocess.run(["scancel", "--full", "--state=PENDING"], env=environment, timeout=60, check=True)
            subprocess.run(["scancel", "--full", "--state=RUNNING"], env=environment, timeout=60, check=True)
            return seconds

        mine, others = interleaved(lambda: timed(ours), lambda: timed(["sbatch", str(script)]), args.repeats)
        # Slurm's epilogs write into the run folders until all jobs have ended.
        subprocess.run(
            ["sh", "-c", "while squeue --noheader | grep -q .; do sleep 0.2; done"],
            env=environment,
            timeout=120,
            check=True,
        )
    seconds, bare = statistics.median(mine), statistics.median(others)
    print(f"muster submit: {seconds:.3f} s (reach {REACH_S:g}); a bare sbatch {bare:.3f} s")
    print(json.dumps({"benchmark": "muster submit", "ours": mine, "sbatch": others, "reach": REACH_S}))
    return 0 if seconds <= REACH_S else 1


if __name__ == "__main__":
    sys.exit(main())
