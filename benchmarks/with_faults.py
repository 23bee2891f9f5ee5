"""`muster verify --with` on classes with one fault each, and on right ones: is each fault found by its property?

    python benchmarks/with_faults.py [--ranks N] [--only NAME]

A fault counts as found if the property that names it fails and no other one does, but for those that follow from it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Options, finish, table

ROOT = Path(__file__).resolve().parents[1]
MUSTER = Path(sys.executable).with_name("muster")
JOB = ROOT / "jobs/examples/gpt-nano.yaml"
WRAPPERS, OTHERS = "benchmarks/faulty/wrappers.py", "benchmarks/faulty/others.py"
OWN = "jobs/examples/own"
TRAINS = "one-process"  # follows from most faults

# A class, and the properties that fail: the first one names the fault, the others follow from it.
FAULTY = {
    f"{WRAPPERS}:NoBroadcast": ("parameters-broadcast",),
    f"{WRAPPERS}:NoBuffers": ("buffers-broadcast",),
    f"{WRAPPERS}:Sum": ("mean", TRAINS),
    f"{WRAPPERS}:SkipsTied": ("tied", TRAINS),
    f"{WRAPPERS}:DropsOne": ("every-parameter", TRAINS),
    f"{WRAPPERS}:OneByOne": ("buckets",),
    f"{WRAPPERS}:NoOverlap": ("overlap",),
    f"{WRAPPERS}:Blocking": ("overlap",),
    f"{WRAPPERS}:LastMicroBatch": ("micro-batches",),
    f"{WRAPPERS}:WaitsForever": ("no-hang", TRAINS),
    f"{WRAPPERS}:Raises": ("runs", "micro-batches", "unused", "unused-somewhere", TRAINS),
    f"{WRAPPERS}:LeavesUnused": ("unused-somewhere",),
    f"{WRAPPERS}:SameData": ("data",),
    f"{WRAPPERS}:UnequalSteps": ("steps",),
    f"{OTHERS}:KeepsAllState": ("state-sharded",),
    f"{OTHERS}:NoBroadcastAfterStep": ("agree", "groups", TRAINS),
    f"{OTHERS}:ForgetsGroups": ("groups",),
    f"{OTHERS}:KeepsSettings": ("settings",),
    f"{OTHERS}:KeepsParameters": ("parameters-sharded",),
    f"{OTHERS}:SumOfShards": ("mean", "micro-batches"),
    f"{OTHERS}:RunsEverything": ("layers-divided", "pipelined"),
    f"{OTHERS}:SumOfMicroBatches": ("gradients", "loss", TRAINS),
    f"{OTHERS}:OneAtATime": ("pipelined",),
}
RIGHT = [
    f"{OWN}/{name}"
    for name in (
        "my_ddp.py:MyDDP",
        "my_optimizer.py:ShardedOptimizer",
        "my_fsdp.py:MyFSDP",
        "my_pipeline.py:MyPipeline",
    )
]


def failing(text: str, ranks: int, runs: str) -> set[str]:
    """Return the properties that `muster verify --with` finds failing."""
    words = ["verify", str(JOB), "--with", text, "--nodes", str(ranks), "--runs", runs, "--json"]
    small = ["train.batch_size=8", "hang_s=4"] + (["train.model.tied=false"] if text not in TIED else [])
    words += [word for each in small for word in ("--set", each)]
    ran = subprocess.run([MUSTER, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if not ran.stdout:
        raise SystemExit(f"{text}: exit code {ran.returncode}\n{ran.stderr}")
    record = json.loads(ran.stdout)
    return {row["name"] for row in record["rows"] if row["state"] == "fails"}


TIED = {text for text in (*FAULTY, *RIGHT) if WRAPPERS in text or "my_ddp" in text}


def main() -> int:
    """Check every class; exit with 1 if a fault is missed or a right class fails."""
    parser = Options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="classes whose names contain this")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as runs:
        for text in (*FAULTY, *RIGHT):
            if args.only not in text:
                continue
            expected, found = FAULTY.get(text, ()), failing(text, args.ranks, runs)
            reached = set(expected[:1]) <= found <= set(expected)
            rows.append({"class": text, "expected": expected, "found": sorted(found), "reached": reached})
    head = ("class", "names the fault", "fails", "")
    cells = [
        (
            row["class"].rpartition("/")[2],
            row["expected"][0] if row["expected"] else "(right)",
            ", ".join(row["found"]) or "nothing",
            "yes" if row["reached"] else "NO",
        )
        for row in rows
    ]
    table(head, cells)
    return finish(args, "with_faults", rows)


if __name__ == "__main__":
    raise SystemExit(main())
