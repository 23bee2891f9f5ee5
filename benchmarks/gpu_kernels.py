"""Where a step's time goes on the GPU: kernels by kind, what communication hides and what it does not, and gaps."""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from muster.jobs.trace.intervals import difference, length, union

TOP = 14  # kernels that are told by name
NO_KERNEL = re.compile("^(nccl:|##|Optimizer|DistributedDataParallel|ProfilerStep|Torch-Compiled)")
KINDS = {  # the first that fits
    "nccl": "nccl",
    "optimizer": "adam|fused_sgd|FusedSgd|FusedAdam",
    "attention": "flash|fmha|sdpa|attention",
    "matmul": "gemm|nvjet|cutlass|cublas|xmma|wgmma|splitK|gemv",
    "convolution": "conv|dgrad|wgrad|implicit|nchwToNhwc|nhwcToNchw",
    "copy": "copy|memcpy|memset|fill|CatArray|transpose",
    "norm": "norm",
    "loss": "softmax|nll|cross_entropy",
    "generated": "triton",
    "reduction": "reduce",
}


def kernels_of(run: Callable[[], Any]) -> list[tuple[str, float, float, int]]:
    """Run something under the profiler; return (name, start, end, stream) of everything on the GPU, in milliseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    assert recorded.profiler is not None
    found = []
    for event in recorded.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0 and not NO_KERNEL.match(event.name()):
            start = event.start_ns() / 1e6
            found.append((event.name(), start, start + event.duration_ns() / 1e6, event.device_resource_id()))
    return sorted(found, key=lambda each: each[1])


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "elementwise")


def account(kernels: list[tuple[str, float, float, int]], steps: int) -> dict[str, Any]:
    """Add up kernels, in milliseconds a step."""
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for name, start, end, _ in kernels:
        kinds[kind_of(name)] += (end - start) / steps
        names[name].append(end - start)
    wire = union([(start, end) for name, start, end, _ in kernels if kind_of(name) == "nccl"])
    compute = union([(start, end) for name, start, end, _ in kernels if kind_of(name) != "nccl"])
    span = max(end for _, _, end, _ in kernels) - min(start for _, start, _, _ in kernels)
    top = sorted(names.items(), key=lambda each: -sum(each[1]))[:TOP]
    return {
        "span": span / steps,
        "computing": length(compute) / steps,
        "communicating": length(wire) / steps,
        "exposed": length(difference(wire, compute)) / steps,
        "idle": (span - length(union([*wire, *compute]))) / steps,
        "kernels": len(kernels) / steps,
        "kinds": {kind: round(spent, 3) for kind, spent in sorted(kinds.items(), key=lambda each: -each[1])},
        "top": [(name[:90], len(times) // steps, round(sum(times) / steps, 3)) for name, times in top],
    }


def text_of(side: str, found: dict[str, Any]) -> str:
    """Write an account for people."""
    head = "  ".join(f"{key} {found[key]:.2f}" for key in ("span", "computing", "communicating", "exposed", "idle"))
    lines = [f"{side}: {head}  kernels {found['kernels']:.0f}"]
    lines.append("    " + "  ".join(f"{kind} {spent:.2f}" for kind, spent in found["kinds"].items()))
    return "\n".join([*lines, *(f"    {spent:8.3f} ms {count:5d} x {name}" for name, count, spent in found["top"])])
