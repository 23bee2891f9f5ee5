"""Tensor parallel: blocks of a GPT split over the GPUs of one host, ours beside PyTorch's parallelize_module.

    python benchmarks/gpu_tensor.py --gpus 4 --minutes 6 --out FOLDER          python benchmarks/gpu_tensor.py --smoke

Forward and backward of 32 blocks of width 2560, 8 sequences of 1024 tokens, bf16, eager: reach 1.3 x the fastest of

    torch              column and row plans, the input of attention made whole once (PrepareModuleInput)
    torch each         the same, query, key and value each by itself
    torch sequence     SequenceParallel norms, the sequence gathered and scattered

    ours               pipe.tensor, our plan: one exchange, one product for query, key and value
    ours sequence      with sequence_parallel, along dimension 1; `ours batch`: along dimension 0
    ours compiled      each block compiled; `torch compiled` beside it, for what it is worth

All begin with the same weights, and their results are compared. Sides take turns, A B C C B A; a block of steps counts
as its slowest rank does; a ratio is the median over turns. The processes are those of gpu_throughput.py.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

SHAPE = {"d_model": 2560, "d_ff": 10240, "layers": 32, "heads": 32, "context": 1024, "vocabulary": 512}
SMOKE = {"d_model": 64, "d_ff": 256, "layers": 2, "heads": 4, "context": 16, "vocabulary": 512}
SIDES = ("torch", "torch each", "torch sequence", "ours", "ours sequence", "ours batch")
HELD = "ours"  # whose fastest must reach
REACH = 1.3
WITHIN = 0.02  # norms of results in bf16


def tell(each: dict[str, Any]) -> None:
    """Print what rank 0 says, but for single times."""
    if each["say"] != "sample":
        print("  " + each.get("text", json.dumps(each)), flush=True)


def apart(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Name the sides that compute something else than the first."""
    built = [each for each in said if each["say"] == "built"]
    return [
        {"say": "failed", "side": each["side"], "why": f"found {each['found']}, the first {built[0]['found']}"}
        for each in built
        if any(abs(mine - first) > WITHIN * first for mine, first in zip(each["found"], built[0]["found"], strict=True))
    ]


def summary(said: list[dict[str, Any]], gpus: int) -> dict[str, Any]:
    """Print the table; return the record."""
    samples: dict[str, list[float]] = {}
    for each in said:
        if each["say"] == "sample":
            samples.setdefault(each["side"], []).append(each["step_ms"])
    tokens = next((each["tokens"] for each in said if each["say"] == "ready"), 0)
    peaks = {each["side"]: each["peak_bytes"] / 2**30 for each in said if each["say"] == "built"}
    medians = {side: statistics.median(times) for side, times in samples.items()}
    theirs = min((side for side in medians if side.startswith("torch")), key=medians.__getitem__, default=None)
    ratios: dict[str, float] = {}
    print(f"  {'side':18} {'ms a step':>10} {'min':>9} {'max':>9} {'tokens/s':>10} {'x torch':>8} {'peak GiB':>9}")
    for side, times in samples.items():
        if theirs is not None:
            ratios[side] = statistics.median([b / a for a, b in zip(times, samples[theirs], strict=False)])
        print(
            f"  {side:18} {medians[side]:10.3f} {min(times):9.3f} {max(times):9.3f} "
            f"{tokens / medians[side] * 1e3:10.0f} {ratios.get(side, float('nan')):8.3f} {peaks.get(side, 0.0):9.2f}"
        )
    best = max((ratio for side, ratio in ratios.items() if side.startswith(HELD)), default=0.0)
    failed = [*(each for each in said if each["say"] == "failed"), *apart(said)]
    for each in failed:
        print(f"  PROBLEM: {each}", flush=True)
    reached = best >= REACH and not failed
    print(f"  reach {REACH} x {theirs}: {best:.3f}, {'yes' if reached else 'NO'}", flush=True)
    return {
        "gpus": gpus,
        "samples_ms": samples,
        "ratios": ratios,
        "peaks_gib": peaks,
        "reached": reached,
        "failed": failed,
    }


def main() -> int:
    """Measure the sides that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default=",".join(SIDES), help="of these, and: ours compiled, torch compiled")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--norm", default="layer", choices=("layer", "rms"))
    parser.add_argument("--no-bias", action="store_true")
    parser.add_argument("--repeats", type=int, default=6, help="blocks of each side")
    parser.add_argument("--block-s", type=float, default=1.0)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--profile", action="store_true", help="after measuring, tell where steps spend their time")
    parser.add_argument("--smoke", action="store_true", help="small blocks on the CPU: only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("gpu-tensor"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    from gpu_listen import listen, start

    ranks = start(HERE / "gpu_tensor_ranks.py", "TENSOR_ORDER", args)
    record = summary(listen(ranks, 60.0 * args.minutes, tell), args.gpus)
    (args.out / "gpu_tensor.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"benchmark": "gpu_tensor", **{k: v for k, v in record.items() if k != "samples_ms"}}))
    return 0 if record["reached"] or (args.smoke and not record["failed"]) else 1


if __name__ == "__main__":
    sys.exit(main())
