"""Training throughput on the GPUs of one host: ours beside PyTorch's DistributedDataParallel, in the same processes.

    python benchmarks/gpu_throughput.py --rows a,b-medium,b-xl,c,d --gpus 2 --repeats 5 --minutes 8 --out FOLDER

    a          GPT small (163 M parameters, context 1024, vocabulary 50,304, untied, biases, LayerNorm), 32 sequences a
               GPU, bf16, compiled; reach 1.15 x the best of PyTorch's sides, 1.12 x on one GPU, and 0.97 of
               one GPU's speed
    a-tweaked  the same against PyTorch's with bf16 weights and no masters
    b-medium   GPT medium, not compiled, bf16 autocast on both sides (and our engine's other ways); reach 1.05 x
    b-xl       GPT xl; b-xl-best: with our engine's pure_bf16
    c          VGG-11 on images of 32 x 32, 128 a GPU; PyTorch's eagerly, ours as one CUDA graph a step; reach 1.5 x
    d-*        peak of allocated memory from before the wrap until after three steps; reach 1.00 of PyTorch's
    e-*        zero1 beside ZeroRedundancyOptimizer, bf16 autocast: GPT medium, reach 1.08 x; GPT xl, 1.10 x
    f-*        zero3 beside fully_shard of every block, bf16 from fp32 masters; reach 1.05 x
    g-*        peaks of memory of those, as d-*
    h          GPT 2.7b (context 128) trains in zero3: bytes held between two steps; reach 1.05 of the formula
    s-small    GPT small, 16 x 128 tokens a GPU: steps replayed from CUDA graphs beside eager ones; reach 4, 3 and 3 x
    x-xl       GPT xl on one GPU; reach 1.30 x
    w-*        speed per GPU of bucketed, zero1, zero3 and fsdp beside one GPU's: reach 0.97; also --gpus 2 and 8
    p-*        pipelines, a stage or two a GPU, beside torch.distributed.pipelining: benchmarks/gpu_rows.py

    python benchmarks/gpu_throughput.py --rows e-medium,e-xl,e-xl-best,f-medium,f-xl --gpus 4 --minutes 15 --out FOLDER
    python benchmarks/gpu_throughput.py --rows g-zero1-medium,g-zero1-xl,g-zero3-medium,g-zero3-xl,h --gpus 4 \\
        --minutes 15 --out FOLDER
    python benchmarks/gpu_throughput.py --rows p-1f1b-8,p-1f1b-16,p-zb,p-xl,p-memory,p-2-copies --gpus 4 \\
        --minutes 9 --out FOLDER

    python benchmarks/gpu_throughput.py --short --gpus 2 --repeats 4 --block-s 0.7 --minutes 9 --out FOLDER

Sides take turns, A B C C B A ..., each for a block of steps between two CUDA events; a block counts as its slowest rank
does. A ratio is the median over turns of the two blocks' ratio. Sides of a row begin with the same weights and train on
the same batches; how far their losses are apart is told. Every row has processes of its own: one that fails costs
itself. Results are written as they come.
"""

import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_kernels import text_of
from gpu_ranks import rank_main
from gpu_rows import ROWS, SHORT, Row
from harness import Options, finish, table
from ranks import hear

ALONE_IN_PROCESS = ("memory", "states")  # what one side leaves behind would count for the next
LEAST_S = 15.0  # with less time left, a row is not begun


def play(name: str, row: Row, args: Any, deadline_s: float) -> dict[str, Any]:
    """Run one row with fresh ranks, with less memory after each time it did not suffice; return what came of it."""
    result: dict[str, Any] = {}
    specs = [each for each in row.specs if not (args.smoke and each.get("graph") is True)]
    wanted = args.sides.split(";") if args.sides else SHORT.get(name) if args.short else None
    if wanted:
        specs = [each for each in specs if each["name"] in wanted]
    if row.what in ALONE_IN_PROCESS:
        results = [attempt(name, row, row.batches[0], [each], args, deadline_s) for each in specs]
        problems = "; ".join(each["problem"] for each in results if each["problem"])
        return {**results[0], "said": [said for each in results for said in each["said"]], "problem": problems}
    for batch in (2,) if args.smoke else row.batches:
        result = attempt(name, row, batch, specs, args, deadline_s)
        if not any(said["say"] == "failed" and said.get("memory") for said in result["said"]):
            break
        print(f"  batch {batch} does not fit", flush=True)
    return result


def attempt(
    name: str, row: Row, batch: int, specs: Sequence[dict[str, Any]], args: Any, deadline_s: float
) -> dict[str, Any]:
    """Run sides of a row in fresh processes; return what they said."""
    order = {
        "model": ("gpt-nano" if row.model.startswith("gpt") else row.model) if args.smoke else row.model,
        "batch": batch,
        "what": row.what,
        "specs": specs,
        "repeats": args.repeats,
        "block_s": 0.05 if args.smoke else args.block_s,
        "ceiling": row.ceiling,
        "profile": args.profile and not args.smoke,
        "smoke": args.smoke,
        "stock": row.stock,
        "microbatches": row.microbatches,
        "copies": row.copies,
    }
    limit_s = min(row.limit_s, deadline_s - time.monotonic())
    result = {"row": name, "batch": batch, "gpus": args.gpus, "reach": row.reach, "said": [], "problem": ""}
    for said in hear(rank_main, args.gpus, limit_s=limit_s, order=order) if limit_s >= LEAST_S else ():
        if said["say"] == "failed" and "side" not in said:  # the ranks, not a side
            result["problem"] = said["why"]
            continue
        result["said"].append(said)
        with (args.out / "events.jsonl").open("a") as file:
            file.write(json.dumps({"row": name, "batch": batch, **said}) + "\n")
        tell(said)
    if limit_s < LEAST_S:
        result["problem"] = "no time left"
    if result["problem"]:
        print(f"  PROBLEM: {result['problem']}", flush=True)
    return result


def tell(said: dict[str, Any]) -> None:
    """Print what is worth a line."""
    if said["say"] in ("sample", "measured"):
        return
    if said["say"] == "profile":
        print(
            text_of(said["side"], said) + f"\n    last GPU: {[round(each, 2) for each in said['last_gpu']]}", flush=True
        )
        return
    if said["say"] == "memory":
        print(f"  {said['side']:22} peak {said['peak_bytes'] / 2**20:9.1f} MB", flush=True)
        return
    shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in said.items()}
    if "losses" in shown:
        shown["losses"] = [round(loss, 4) for loss in said["losses"]]
    print("  " + json.dumps({key: value for key, value in shown.items() if key != "before_bytes"}), flush=True)


def memory_of(row: Row, result: dict[str, Any], held: set[str], theirs: set[str]) -> dict[str, Any]:
    """Print the bytes of a row's sides over those of PyTorch's side with least, or over the formula of each."""
    told = {said["side"]: said for said in result["said"] if said["say"] == "memory"}
    peaks = {side: said["peak_bytes"] for side, said in told.items()}
    if row.what == "states":
        ratios = {side: peak / told[side]["formula_bytes"] for side, peak in peaks.items()}
    else:
        least = min((peaks[side] for side in theirs & peaks.keys()), default=None)
        ratios = {side: peak / least for side, peak in peaks.items() if least is not None}
    reached = bool(held & ratios.keys()) and all(ratios[side] <= row.reach for side in held & ratios.keys())
    over = "the formula" if row.what == "states" else "torch's"
    print(f"  bytes over {over}: {ratios}  reach <= {row.reach}: {'yes' if reached else 'NO'}")
    return {"peak_bytes": peaks, "ratios": ratios, "reached": reached}


def samples_of(said: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the milliseconds of a step by side, turn by turn."""
    samples: dict[str, list[float]] = {}
    for each in said:
        if each["say"] == "sample":
            samples.setdefault(each["side"], []).append(each["step_ms"])
    return samples


def fastest(samples: dict[str, list[float]], sides: Iterable[str]) -> str | None:
    """Return the side whose median is least."""
    return min(samples.keys() & set(sides), key=lambda side: statistics.median(samples[side]), default=None)


def times_as_fast(samples: dict[str, list[float]], one: str | None, other: str | None) -> float | None:
    """Return how many times as fast a side is as another, the median over turns."""
    pairs = zip(samples.get(one or "", ()), samples.get(other or "", ()), strict=False)
    ratios = [b / a for a, b in pairs]
    return statistics.median(ratios) if ratios else None


def cells_of(side: str, times: list[float], units: float | None, *ratios: float | None) -> list[str]:
    """Write a side's line: milliseconds of a step, rate of what a step trains on, ratios."""
    middle = statistics.median(times)
    rate = f"{units / middle * 1e3:.0f}" if units else "-"
    more = [f"{each:.3f}" if each is not None else "-" for each in ratios]
    return [side, f"{middle:.3f}", f"{min(times):.3f}", f"{max(times):.3f}", rate, *more]


def summary(row: Row, result: dict[str, Any]) -> dict[str, Any]:
    """Print a row's table; return its record."""
    record = {key: result[key] for key in ("row", "batch", "gpus", "reach", "problem")}
    held = {each["name"] for each in row.specs if each.get("held")}
    theirs = {each["name"] for each in row.specs if each["kind"].startswith("torch")}
    alone = {each["name"] for each in row.specs if each.get("alone")}
    own = alone | {each["name"] for each in row.specs if each.get("apart")}
    own = set() if own == {each["name"] for each in row.specs} else own  # a row of one GPU
    if row.what in ALONE_IN_PROCESS:
        return {**record, **memory_of(row, result, held, theirs)}
    samples = samples_of(result["said"])
    units = next((said["units"] for said in result["said"] if said["say"] == "ready"), None)
    best = fastest(samples, theirs - own)
    ones = {side: next((each for each in alone if (each in theirs) == (side in theirs)), None) for side in samples}
    fast = {side: times_as_fast(samples, side, best) for side in samples.keys() - own}
    scale = {side: times_as_fast(samples, side, ones[side]) for side in samples.keys() - alone}
    lines = [cells_of(side, each, units, fast.get(side), scale.get(side)) for side, each in samples.items()]
    table(["  side", "ms a step", "min", "max", "units/s/GPU", "x torch", "x alone"], lines)
    ratios, scaling = ({side: each for side, each in found.items() if each is not None} for found in (fast, scale))
    found = held & ratios.keys()
    reached = bool(found) and all(ratios[side] >= row.reach for side in found)
    print(f"  reach {row.reach} x {best}: {'yes' if reached else 'NO'}", flush=True)
    beside = [claim_of(samples, *claim) for claim in row.claims if {*claim[:2]} <= samples.keys()]
    told = {"units": units, "samples_ms": samples, "ratios": ratios, "scaling": scaling, "claims": beside}
    return {**record, **told, "reached": reached and all(claim["reached"] for claim in beside)}


def claim_of(samples: dict[str, list[float]], ours: str, theirs: str, reach: float) -> dict[str, Any]:
    """Print and return what came of one side's claim to be so many times as fast as another."""
    ratio = times_as_fast(samples, ours, theirs)
    reached = ratio is not None and ratio >= reach
    print(f"  {ours} is {ratio} x {theirs}, reach {reach}: {'yes' if reached else 'NO'}", flush=True)
    return {"ours": ours, "against": theirs, "ratio": ratio, "reach": reach, "reached": reached}


def main() -> int:
    """Play the rows that are asked for."""
    parser = Options(__doc__, repeats=6)
    parser.add_argument("--rows", default="a,b-medium,b-xl,b-xl-best,c,c-bf16,d-gpt,d-vgg", help=", ".join(ROWS))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--block-s", type=float, default=1.5, help="about how long a block takes")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all rows; what is left then is left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-throughput"), help="a folder for all that is said")
    parser.add_argument("--short", action="store_true", help="the rows and sides that count, in about eight minutes")
    parser.add_argument("--sides", default="", help="only these sides of the rows; separated by ;")
    parser.add_argument("--profile", action="store_true", help="after measuring, tell where steps spend their time")
    parser.add_argument("--smoke", action="store_true", help="small models on the CPU: only to see that it runs")
    args = parser.parse_args()
    if args.short and args.rows == parser.get_default("rows"):
        args.rows = ",".join(SHORT)
    args.out.mkdir(parents=True, exist_ok=True)
    deadline_s, records = time.monotonic() + 60.0 * args.minutes, []
    for name in args.rows.split(","):
        row, began_s = ROWS[name], time.monotonic()
        print(f"{name}: {row.model}, {args.gpus} GPUs", flush=True)
        try:
            records.append(summary(row, play(name, row, args, deadline_s)))
        except Exception as error:
            traceback.print_exc()
            records.append({"row": name, "problem": f"{type(error).__name__}: {error}", "reached": False})
        records[-1]["seconds"] = round(time.monotonic() - began_s, 1)
        print(f"  {records[-1]['seconds']} s", flush=True)
        (args.out / "gpu_throughput.json").write_text(json.dumps(records, indent=1) + "\n")
    return finish(args, "gpu throughput", records, gpus=args.gpus)


if __name__ == "__main__":
    sys.exit(main())
