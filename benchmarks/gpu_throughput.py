"""Training throughput on the GPUs of one host: ours beside PyTorch's DistributedDataParallel, in the same processes.

    python benchmarks/gpu_throughput.py --rows a,b-medium,b-xl,c,d --gpus 2 --repeats 5 --minutes 8 --out FOLDER

    a          GPT small (163 M parameters, context 1024, vocabulary 50,304, untied, biases, LayerNorm), 32 sequences a
               GPU, bf16, compiled; reach 1.04 x the best of PyTorch's sides, and 0.97 of one GPU's speed
    a-tweaked  the same against PyTorch's with bf16 weights and no masters
    b-medium   GPT medium, not compiled, bf16 autocast on both sides (and our engine's other ways); reach 1.02 x
    b-xl       GPT xl; b-xl-best: with our engine's pure_bf16
    c          VGG-11 on images of 32 x 32, 128 a GPU; PyTorch's eagerly, ours as one CUDA graph a step; reach 1.5 x
    d-*        peak of allocated memory from before the wrap until after three steps; reach 1.00 of PyTorch's
    e-*        zero1 beside ZeroRedundancyOptimizer, bf16 autocast: GPT medium, reach 1.05 x; GPT xl, 1.10 x
    f-*        zero3 beside fully_shard of every block, bf16 from fp32 masters; reach 1.05 x
    g-*        peaks of memory of those, as d-*
    h          GPT 2.7b (context 128) trains in zero3: bytes held between two steps; reach 1.05 of the formula
    p-*        pipelines, a stage or two a GPU, beside torch.distributed.pipelining: benchmarks/gpu_pipe_rows.py

    python benchmarks/gpu_throughput.py --rows e-medium,e-xl,e-xl-best,f-medium,f-xl --gpus 4 --minutes 15 --out FOLDER
    python benchmarks/gpu_throughput.py --rows g-zero1-medium,g-zero1-xl,g-zero3-medium,g-zero3-xl,h --gpus 4 \\
        --minutes 15 --out FOLDER
    python benchmarks/gpu_throughput.py --rows p-1f1b-8,p-1f1b-16,p-zb,p-xl,p-memory --gpus 4 --minutes 9 --out FOLDER

Sides take turns, A B C C B A ..., each for a block of steps between two CUDA events; a block counts as its slowest rank
does. A ratio is the median over turns of the two blocks' ratio. Sides of a row begin with the same weights and train on
the same batches; how far their losses are apart is told. Every row has processes of its own: one that fails costs
itself. Results are written as they come.
"""

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_kernels import text_of
from gpu_pipe_rows import PIPE_ROWS
from gpu_rows import ROWS, Row

HERE = Path(__file__).resolve().parent
ALL_ROWS = {**ROWS, **PIPE_ROWS}


ALONE_IN_PROCESS = ("memory", "states")  # what one side leaves behind would count for the next


def play(name: str, row: Row, args: argparse.Namespace, deadline_s: float) -> dict[str, Any]:
    """Run one row with fresh ranks, with less memory after each time it did not suffice; return what came of it."""
    result: dict[str, Any] = {}
    specs = [each for each in row.specs if not (args.smoke and each.get("graph"))]
    if row.what in ALONE_IN_PROCESS:
        return joined([attempt(name, row, row.batches[0], [each], args, deadline_s) for each in specs])
    for batch in (2,) if args.smoke else row.batches:
        result = attempt(name, row, batch, specs, args, deadline_s)
        if not any(said["say"] == "failed" and said.get("memory") for said in result["said"]):
            break
        print(f"  batch {batch} does not fit", flush=True)
    return result


def attempt(
    name: str, row: Row, batch: int, specs: Sequence[dict[str, Any]], args: argparse.Namespace, deadline_s: float
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
    }
    limit_s = min(row.limit_s, deadline_s - time.monotonic())
    result = {"row": name, "batch": batch, "gpus": args.gpus, "reach": row.reach, "said": [], "problem": ""}
    for said in listen(order, args, limit_s, result):
        result["said"].append(said)
        keep(args.out / "events.jsonl", {"row": name, "batch": batch, **said})
        tell(said)
    if result["problem"]:
        print(f"  PROBLEM: {result['problem']}", flush=True)
    return result


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Put several results of a row together."""
    said = [each for result in results for each in result["said"]]
    problems = [result["problem"] for result in results if result["problem"]]
    return {**results[0], "said": said, "problem": "; ".join(problems)}


def listen(
    order: dict[str, Any], args: argparse.Namespace, limit_s: float, result: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Start ranks, yield what rank 0 says; note in `result` what went wrong, and leave no rank behind."""
    if limit_s < 15.0:
        result["problem"] = "no time left"
        return
    ranks = start_ranks(order, args.gpus)
    pipe = ranks[0].stdout
    assert pipe is not None
    deadline_s, rest, ended = time.monotonic() + limit_s, b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not ended:
            if selector.select(1.0):
                read = os.read(pipe.fileno(), 1 << 16)
                ended = not read
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    try:
                        yield json.loads(line)
                    except ValueError:
                        print(f"  | {line.decode(errors='replace')}", flush=True)
            if time.monotonic() > deadline_s:
                result["problem"] = f"no end within {limit_s:.0f} s"
                break
            if any(rank.poll() for rank in ranks):
                result["problem"] = f"ranks ended with {[rank.poll() for rank in ranks]}"
                break
    codes = end(ranks, patience_s=0.0 if result["problem"] else 20.0)
    if not result["problem"] and any(codes):
        result["problem"] = f"ranks ended with {codes}"


def start_ranks(order: dict[str, Any], gpus: int) -> "list[subprocess.Popen[bytes]]":
    """Start one process for each GPU, on a free port of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    common = {"WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path}
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **common, "GPU_ORDER": json.dumps(order)}
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "gpu_ranks.py")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(gpus)
    ]


def end(ranks: "list[subprocess.Popen[bytes]]", *, patience_s: float) -> list[int]:
    """Wait for the ranks to end, then make them; return their codes."""
    deadline_s = time.monotonic() + patience_s
    for rank in ranks:
        try:
            rank.wait(max(deadline_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            rank.kill()
    return [rank.wait() for rank in ranks]


def keep(path: Path, said: dict[str, Any]) -> None:
    """Append one line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(said) + "\n")


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


def summary(row: Row, result: dict[str, Any]) -> dict[str, Any]:
    """Print a row's table; return its record."""
    record = {key: result[key] for key in ("row", "batch", "gpus", "reach", "problem")}
    held = {each["name"] for each in row.specs if each.get("held")}
    theirs = {each["name"] for each in row.specs if each["kind"].startswith("torch")}
    alone = {each["name"] for each in row.specs if each.get("alone")}
    own = alone | {each["name"] for each in row.specs if each.get("apart")}
    if row.what in ALONE_IN_PROCESS:
        return {**record, **memory_of(row, result, held, theirs)}
    samples: dict[str, list[float]] = {}
    for said in result["said"]:
        if said["say"] == "sample":
            samples.setdefault(said["side"], []).append(said["step_ms"])
    units = next((said["units"] for said in result["said"] if said["say"] == "ready"), None)
    medians = {side: statistics.median(times) for side, times in samples.items()}
    best = min((side for side in medians if side in theirs - own), key=medians.__getitem__, default=None)
    ratios, scaling = {}, {}
    print(f"  {'side':22} {'ms a step':>10} {'min':>9} {'max':>9} {'units/s/GPU':>12} {'x torch':>8} {'x alone':>8}")
    for side, times in samples.items():
        one = next((each for each in alone & medians.keys() if (each in theirs) == (side in theirs)), None)
        if best is not None and side not in own:
            ratios[side] = statistics.median([b / a for a, b in zip(times, samples[best], strict=False)])
        if one is not None and side not in alone:
            scaling[side] = statistics.median([b / a for a, b in zip(times, samples[one], strict=False)])
        rate = f"{units / medians[side] * 1e3:12.0f}" if units else f"{'-':>12}"
        print(
            f"  {side:22} {medians[side]:10.3f} {min(times):9.3f} {max(times):9.3f} {rate} "
            f"{ratios.get(side, float('nan')):8.3f} {scaling.get(side, float('nan')):8.3f}"
        )
    found = held & ratios.keys()
    reached = bool(found) and all(ratios[side] >= row.reach for side in found)
    print(f"  reach {row.reach} x {best}: {'yes' if reached else 'NO'}", flush=True)
    beside = [claim_of(samples, claim) for claim in row.claims]
    told = {"units": units, "samples_ms": samples, "ratios": ratios, "scaling": scaling, "claims": beside}
    return {**record, **told, "reached": reached and all(claim["reached"] for claim in beside)}


def claim_of(samples: dict[str, list[float]], claim: tuple[str, str, float]) -> dict[str, Any]:
    """Print and return what came of one side's claim to be so many times as fast as another."""
    ours, theirs, reach = claim
    pairs = zip(samples.get(ours, ()), samples.get(theirs, ()), strict=False)
    ratios = [other / one for one, other in pairs]
    ratio = statistics.median(ratios) if ratios else None
    reached = ratio is not None and ratio >= reach
    print(f"  {ours} is {ratio} x {theirs}, reach {reach}: {'yes' if reached else 'NO'}", flush=True)
    return {"ours": ours, "against": theirs, "ratio": ratio, "reach": reach, "reached": reached}


def main() -> int:
    """Play the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="a,b-medium,b-xl,b-xl-best,c,c-bf16,d-gpt,d-vgg", help=", ".join(ALL_ROWS))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=6, help="blocks of each side")
    parser.add_argument("--block-s", type=float, default=1.5, help="about how long a block takes")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all rows; what is left then is left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-throughput"))
    parser.add_argument("--profile", action="store_true", help="after measuring, tell where steps spend their time")
    parser.add_argument("--smoke", action="store_true", help="small models on the CPU: only to see that it runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    deadline_s, records = time.monotonic() + 60.0 * args.minutes, []
    for name in args.rows.split(","):
        row, began_s = ALL_ROWS[name], time.monotonic()
        print(f"{name}: {row.model}, {args.gpus} GPUs", flush=True)
        try:
            records.append(summary(row, play(name, row, args, deadline_s)))
        except Exception as error:
            import traceback

            traceback.print_exc()
            records.append({"row": name, "problem": f"{type(error).__name__}: {error}", "reached": False})
        records[-1]["seconds"] = round(time.monotonic() - began_s, 1)
        print(f"  {records[-1]['seconds']} s", flush=True)
        (args.out / "gpu_throughput.json").write_text(json.dumps(records, indent=1) + "\n")
    print(json.dumps({"benchmark": "gpu_throughput", "gpus": args.gpus, "rows": records}))
    return 0 if all(record["reached"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
