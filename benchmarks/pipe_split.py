"""What it costs to make a backward of two halves: gradients of inputs, then those of weights, over a plain backward.

    plain   torch.autograd.backward
    ours    the same within `WeightQueue.collecting`, then `WeightQueue.run`
    torch   stage_backward_input, stage_backward_weight of torch.distributed.pipelining

Four GPT blocks (width d, a sequence of 128, one sample, `--samples` more), gradients that are added to those of a
micro-batch before, as in a pipeline. The forward is not measured, but told. One thread, CPU time, sides in the order
A B B A; with `--device cuda` wall time until the GPU is idle, bf16, wider blocks and longer sequences.

    .venv/bin/python benchmarks/pipe_split.py [--exact] [--repeats 60] [--quick] [--device cuda]

Reach: ours over plain <= 1.05 at every width; torch's is told beside it. About 1 minute; `--quick` 10 s.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from harness import Options, compare, finish, numbers, turns
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import TransformerBlock
from muster.pipe.splitting.halves import WeightQueue

REACH = 1.05
BLOCKS = 4
CPU_WIDTHS, CUDA_WIDTHS = (64, 128, 256), (512, 1024, 2048)
CPU_TOKENS, CUDA_TOKENS = 128, 1024
HEAD_WIDTH = {"cpu": 32, "cuda": 64}


class Side(NamedTuple):
    """One way of going back, on blocks of its own."""

    blocks: nn.Module
    back: Callable[[Tensor, Tensor, Tensor], None]


def sides_of(width: int, device: str, *, exact: bool) -> dict[str, Side]:
    """Build three copies of the blocks, and the ways back through them."""
    shape = GptShape("bench", width, 4 * width, BLOCKS, width // HEAD_WIDTH[device], bias=True, norm="layer")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made: dict[str, nn.Module] = {}
    for name in ("plain", "ours", "torch"):
        torch.manual_seed(0)
        made[name] = nn.Sequential(*(TransformerBlock(shape) for _ in range(BLOCKS))).to(device, dtype)
    queue = WeightQueue(made["ours"], exact=exact)

    def plain(x: Tensor, y: Tensor, gradient: Tensor) -> None:
        torch.autograd.backward(y, gradient)

    def ours(x: Tensor, y: Tensor, gradient: Tensor) -> None:
        with queue.collecting(0):
            torch.autograd.backward(y, gradient)
        queue.run(0)

    def theirs(x: Tensor, y: Tensor, gradient: Tensor) -> None:
        parameters = list(made["torch"].parameters())
        _, groups = stage_backward_input([y], [gradient], [x], iter(parameters))
        stage_backward_weight(iter(parameters), groups)

    ways = {"plain": plain, "ours": ours, "torch": theirs}
    return {name: Side(made[name], way) for name, way in ways.items()}


def measure(side: Side, x: Tensor, gradient: Tensor, passes: int, forwards: list[float]) -> float:
    """Return the seconds of a backward, the mean over some passes; what the forwards take is put down."""
    clock = perf_counter if x.is_cuda else process_time
    backward_s = forward_s = 0.0
    for _ in range(passes):
        x.grad = None
        begun = clock()
        y = side.blocks(x)
        _rest(x)
        forwarded = clock()
        side.back(x, y, gradient)
        _rest(x)
        forward_s += forwarded - begun
        backward_s += clock() - forwarded
    forwards.append(forward_s / passes)
    return backward_s / passes


def _rest(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def check(sides: dict[str, Side], x: Tensor, gradient: Tensor) -> dict[str, float]:
    """Go back once in each way: return how far each one's gradients are from the plain ones, over their norm."""
    grads = {}
    for name, side in sides.items():
        x.grad = None
        side.back(x, side.blocks(x), gradient)
        made = [torch.zeros_like(each) if each.grad is None else each.grad for each in side.blocks.parameters()]
        grads[name] = torch.cat([each.flatten().double() for each in made])
    plain = grads["plain"]
    return {name: ((each - plain).norm() / plain.norm()).item() for name, each in grads.items() if name != "plain"}


def row_of(width: int, args: Any) -> dict[str, Any]:
    """Measure one width."""
    tokens = CUDA_TOKENS if args.device == "cuda" else CPU_TOKENS
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    sides = sides_of(width, args.device, exact=args.exact)
    x = torch.randn(args.samples, tokens, width, device=args.device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    apart = check(sides, x, gradient)
    if max(apart.values()) > (1e-2 if dtype == torch.bfloat16 else 1e-5):
        raise SystemExit(f"gradients differ: {apart}")
    forwards: dict[str, list[float]] = {name: [] for name in sides}
    run = {name: partial(measure, side, x, gradient, args.passes, forwards[name]) for name, side in sides.items()}
    ours = turns({name: run[name] for name in ("ours", "plain")}, args.repeats, warm_up=1)
    beside = turns({name: run[name] for name in ("torch", "plain")}, max(3, args.repeats // 3), warm_up=1)
    forward = {name: statistics.median(each) for name, each in forwards.items()}
    about = {"device": args.device, "samples": args.samples, "tokens": tokens, "exact": args.exact}
    torchs = statistics.median(a / b for a, b in zip(beside["torch"], beside["plain"], strict=True))
    found = {"apart": apart, "forward_s": forward, "torch_ratio": torchs}
    row = compare(f"pipe_split d={width}", ours["ours"], ours["plain"], reach=REACH, **about, **found)
    print(
        f"  torch's halves over plain {torchs:.3f}; forward {forward['ours'] / forward['plain']:.3f} of a plain one\n"
    )
    return row


def main() -> int:
    """Measure all widths."""
    parser = Options(__doc__, repeats=60, quick={"repeats": 8, "passes": 2})
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--exact", action="store_true", help="the bits of plain accumulation")
    parser.add_argument("--passes", type=int, default=3, help="forwards and backwards of one measurement")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--widths", type=numbers, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    widths = args.widths or (CUDA_WIDTHS if args.device == "cuda" else CPU_WIDTHS)
    return finish(args, "pipe split", [row_of(width, args) for width in widths])


if __name__ == "__main__":
    sys.exit(main())
