"""Tensor parallel: blocks of a GPT split over the GPUs of one host, ours beside PyTorch's parallelize_module.

    python benchmarks/gpu_tensor.py --gpus 4 --minutes 6 --out FOLDER          python benchmarks/gpu_tensor.py --smoke

Forward and backward of 32 blocks of width 2560, 8 sequences of 1024 tokens, bf16, eager: reach 1.3 x the fastest of

    torch              column and row plans, the input of attention made whole once (PrepareModuleInput)
    torch each         the same, query, key and value each by itself
    torch sequence     SequenceParallel norms, the sequence gathered and scattered

    ours               pipe.tensor, our plan: one exchange, one product for query, key and value
    ours sequence      with sequence_parallel, along dimension 1; `ours batch`: along dimension 0
    ours compiled      each block compiled; `torch compiled` beside it, for what it is worth
    torch fsdp         with --data 2: every block in fully_shard, and not resharded between forward and backward

With --data 2 there are two copies. Their gradients are averaged in buckets of 100 MB, in BucketedDDP or
DistributedDataParallel.

All begin with the same weights, and their results are compared. Sides take turns, A B C C B A; a block of steps counts
as its slowest rank does; a ratio is the median over turns.
"""

import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_stage
import torch
import torch.distributed as dist
from gpu_kernels import account, kernels_of, text_of
from gpu_rows import LARGE_MB
from gpu_throughput import cells_of, fastest, samples_of, times_as_fast
from harness import Options, finish, table
from ranks import hear, say
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import BucketedDDP
from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import TransformerBlock, assemble_gpt
from muster.jobs.train.models.tensor_plan import GPT_PLAN
from muster.pipe.tensor import parallelize

SHAPE = {"d_model": 2560, "d_ff": 10240, "layers": 32, "heads": 32, "context": 1024, "vocabulary": 512}
SMOKE = {"d_model": 64, "d_ff": 256, "layers": 2, "heads": 4, "context": 16, "vocabulary": 512}
SIDES = ("torch", "torch each", "torch sequence", "ours", "ours sequence", "ours batch")
SIDES_OF_COPIES = ("torch", "torch each", "torch fsdp", "ours", "ours batch")
HELD = "ours"  # whose fastest must reach
REACH = 1.3
WITHIN = 0.02  # norms of results in bf16
SEQUENCE_OF = {"ours sequence": 1, "ours batch": 0}


class Stage(gpu_stage.Stage):
    """This rank among the others, with what all sides are given."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(smoke=order["smoke"])
        self.order = order
        whole = torch.arange(self.ranks).view(order["data"], -1)
        mesh = DeviceMesh(self.device.type, whole, mesh_dim_names=("data", "tensor"))
        self.copies, self.mesh = mesh["data"], mesh["tensor"]
        self.parts, self.part = whole.shape[1], self.rank % whole.shape[1]
        shape = {**(SMOKE if order["smoke"] else {**SHAPE, "layers": order["layers"]})}
        self.shape = GptShape("blocks", **shape, norm=order["norm"], bias=not order["no_bias"], tied=False)
        self.batch = 4 if order["smoke"] else order["batch"]
        generator = torch.Generator(self.device).manual_seed(1)
        of_input = (self.batch, self.shape.context, self.shape.d_model)
        self.inputs, self.of_outputs = (
            torch.randn(of_input, generator=generator, device=self.device, dtype=torch.bfloat16) for _ in range(2)
        )

    def slowest(self, number: float) -> float:
        """Return the largest of the ranks' numbers."""
        return max(self.all(number))

    def timed(self, run: Callable[[], Any]) -> float:
        """Return the milliseconds that the slowest rank takes."""
        self.synchronize()
        dist.barrier()
        began_s = time.perf_counter()
        run()
        self.synchronize()
        return self.slowest(1e3 * (time.perf_counter() - began_s))


def whole_blocks(stage: Stage) -> nn.Sequential:
    """Build the blocks, the same on every rank."""
    with torch.device(stage.device):
        model = assemble_gpt(stage.shape)
    generator = torch.Generator(stage.device).manual_seed(2)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.dim() > 1:
                each.normal_(std=0.02, generator=generator)
            elif name.endswith("bias"):
                each.zero_()
    blocks = [(name, layer) for name, layer in model.named_children() if isinstance(layer, TransformerBlock)]
    made = nn.Sequential()
    for name, layer in blocks:
        made.add_module(name, layer.to(torch.bfloat16))
    return made


def split_by_torch(blocks: nn.Sequential, stage: Stage, side: str) -> nn.Module:
    """Split with PyTorch's plans."""
    sequence = side == "torch sequence"
    between = Shard(1) if sequence else Replicate()
    for block in blocks:
        assert isinstance(block, TransformerBlock)
        plan: dict[str, Any] = {
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.output": RowwiseParallel(output_layouts=between),
            "mlp.up": ColwiseParallel(input_layouts=between),
            "mlp.down": RowwiseParallel(output_layouts=between),
        }
        if side != "torch each":
            plan["attention"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        if sequence:
            plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
        parallelize_module(block, stage.mesh, plan)
        block.attention.heads //= stage.parts
        if sequence:
            block.norm1.__class__ = block.norm2.__class__ = nn.LayerNorm  # our kernel does not take DTensors
        if side == "torch fsdp":
            fully_shard(block, mesh=stage.copies, reshard_after_forward=False)
    made = _Sequence(blocks, stage) if sequence else blocks
    if stage.order["data"] > 1 and side != "torch fsdp":
        _pre_dp_module_transform(made)
        settings = {"process_group": stage.copies.get_group(), "bucket_cap_mb": LARGE_MB}
        return DistributedDataParallel(made, gradient_as_bucket_view=True, **settings)
    return made


class _Sequence(nn.Module):
    """Blocks between whose split layers each rank has a part of the sequence, as a DTensor's local part."""

    def __init__(self, blocks: nn.Module, stage: Stage) -> None:
        super().__init__()
        self.blocks, self.stage = blocks, stage

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x.chunk(self.stage.parts, 1)[self.stage.part].contiguous())


def build(stage: Stage, side: str) -> nn.Module:
    """Build a side."""
    blocks = whole_blocks(stage)
    if side.startswith("torch"):
        made = split_by_torch(blocks, stage, side)
    else:
        plan = {name: row for name, row in GPT_PLAN.items() if name.startswith("block")}
        dimension = SEQUENCE_OF.get(side)
        sequence = {} if dimension is None else {"sequence_parallel": True, "sequence_dimension": dimension}
        made = parallelize(blocks, plan, stage.mesh.get_group(), **sequence).module  # type: ignore[arg-type]
        if stage.order["data"] > 1:
            made = BucketedDDP(made, stage.copies.get_group(), bucket_size_mb=LARGE_MB)
    if side.endswith("compiled"):
        for block in blocks:
            block.compile(backend="eager" if stage.order["smoke"] else "inductor")
    return made


class Runner:
    """A side at work."""

    def __init__(self, stage: Stage, side: str) -> None:
        self.stage, self.side = stage, side
        self.model = build(stage, side)
        self.dimension = {"torch sequence": 1, **SEQUENCE_OF}.get(side)

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor that blocks take or give."""
        if self.dimension is None:
            return x
        return x.chunk(self.stage.parts, self.dimension)[self.stage.part].contiguous()

    def step(self) -> Tensor:
        """Forward and backward."""
        for each in self.model.parameters():
            each.grad = None
        inputs = self.stage.inputs if self.side == "torch sequence" else self.part(self.stage.inputs)
        x = inputs.detach().requires_grad_()
        y = self.model(x)
        y.backward(self.of_outputs)
        return y.detach()

    def run(self, steps: int) -> Callable[[], None]:
        """Return what runs some steps."""
        self.of_outputs = self.part(self.stage.of_outputs)

        def steps_of() -> None:
            for _ in range(steps):
                self.step()

        return steps_of

    def found(self) -> list[float]:
        """Return norms that all sides must have alike: of the outputs, and of a whole parameter's gradient."""
        self.of_outputs = self.part(self.stage.of_outputs)
        y = self.step().float()
        of_norm = next(each.grad for name, each in self.model.named_parameters() if name.endswith("norm1.weight"))
        of_norm = of_norm.full_tensor() if hasattr(of_norm, "full_tensor") else of_norm
        square = y.square().sum()
        if self.dimension is not None:
            dist.all_reduce(square, group=self.stage.mesh.get_group())
        return [square.sqrt().item(), of_norm.float().norm().item()]


def ready(stage: Stage, side: str) -> Runner:
    """Build a side; return what it computes and the peak memory of a step."""
    runner = Runner(stage, side)
    found = runner.found()
    peak = 0.0
    if stage.device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        runner.step()
        torch.cuda.synchronize()
        own = sum(each.numel() * each.element_size() for each in runner.model.parameters()) / stage.parts
        peak = torch.cuda.max_memory_allocated() - before + own
    for each in runner.model.parameters():
        each.grad = None
    say("built", side=side, found=found, peak_bytes=stage.slowest(peak))
    return runner


def rank_main(**order: Any) -> None:
    """Be one rank: build the sides, compare them, then measure them in turn."""
    warnings.simplefilter("ignore")
    stage = Stage(order)
    say("ready", tokens=stage.batch * stage.shape.context, torch=torch.__version__, ranks=stage.ranks)
    runners: dict[str, Runner] = {}
    for side in order["sides"].split(","):
        try:
            runners[side] = ready(stage, side)
        except Exception as error:
            traceback.print_exc()
            say("failed", side=side, why=f"{type(error).__name__}: {error}"[:300])
    steps: dict[str, int] = {}
    for side, runner in runners.items():
        each_ms = min(stage.timed(runner.run(1)) for _ in range(3))
        steps[side] = 1 if order["smoke"] else max(2, round(order["block_s"] * 1e3 / each_ms))
    for turn in range(2 if order["smoke"] else order["repeats"]):
        sides = list(runners) if turn % 2 == 0 else list(runners)[::-1]
        for side in sides:
            say("sample", side=side, step_ms=stage.timed(runners[side].run(steps[side])) / steps[side])
    if order["profile"] and not order["smoke"]:
        for side, runner in runners.items():
            found = account(kernels_of(runner.run(3)), 3)
            say("profile", side=side, text=text_of(side, found))
    dist.barrier()
    dist.destroy_process_group()


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
    samples = samples_of(said)
    tokens = next((each["tokens"] for each in said if each["say"] == "ready"), 0)
    peaks = {each["side"]: each["peak_bytes"] / 2**30 for each in said if each["say"] == "built"}
    theirs = fastest(samples, (side for side in samples if side.startswith("torch")))
    found = {side: times_as_fast(samples, side, theirs) for side in samples}
    lines = [cells_of(side, times, tokens, found[side], peaks.get(side)) for side, times in samples.items()]
    table(["  side", "ms a step", "min", "max", "tokens/s", "x torch", "peak GiB"], lines)
    ratios = {side: ratio for side, ratio in found.items() if ratio is not None}
    best = max((ratio for side, ratio in ratios.items() if side.startswith(HELD)), default=0.0)
    failed = [*(each for each in said if each["say"] == "failed"), *apart(said)]
    for each in failed:
        print(f"  PROBLEM: {each}", flush=True)
    reached = best >= REACH and not failed
    print(f"  reach {REACH} x {theirs}: {best:.3f}, {'yes' if reached else 'NO'}", flush=True)
    record = {"gpus": gpus, "samples_ms": samples, "ratios": ratios, "peaks_gib": peaks}
    return {**record, "reached": reached, "failed": failed}


def main() -> int:
    """Measure the sides that are asked for."""
    parser = Options(__doc__, repeats=6)
    parser.add_argument("--sides", help=f"default: {','.join(SIDES)}; there are also: ours compiled, torch compiled")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--data", type=int, default=1, help="copies of the split blocks")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--norm", default="layer", choices=("layer", "rms"))
    parser.add_argument("--no-bias", action="store_true")
    parser.add_argument("--block-s", type=float, default=1.0)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--profile", action="store_true", help="after measuring, tell where steps spend their time")
    parser.add_argument("--smoke", action="store_true", help="small blocks on the CPU: only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("gpu-tensor"), help="a folder for the record")
    args = parser.parse_args()
    args.sides = args.sides or ",".join(SIDES if args.data == 1 else SIDES_OF_COPIES)
    args.out.mkdir(parents=True, exist_ok=True)
    order = {name: value for name, value in vars(args).items() if name not in ("gpus", "minutes", "out", "json")}
    said = []
    for each in hear(rank_main, args.gpus, limit_s=60.0 * args.minutes, **order):
        said.append(each)
        if each["say"] != "sample":
            print("  " + each.get("text", json.dumps(each)), flush=True)
    record = summary(said, args.gpus)
    args.json = args.json or args.out / "gpu_tensor.json"
    code = finish(args, "gpu tensor", [record])
    return 0 if args.smoke and not record["failed"] else code


if __name__ == "__main__":
    sys.exit(main())
