"""The pipelines of `gpu_throughput.py`: a GPT in bfloat16, a stage or two on every GPU, ours and PyTorch's.

    pipe         our executor; `schedule` names the table; `cut` is `blocks`, as many on every stage (the first has the
                 embedding too, the last norm and head), or `work`, as much to compute on every GPU; `ctas`: messages go
                 over NCCL with so many thread blocks, not from GPU to GPU by copy engines
    torch pipe   torch.distributed.pipelining, cut by blocks

With `copies`, as many pipelines average their gradients. A step is forward and backward of all micro-batches, gradients
from none; no optimizer, which costs all sides the same. The batch is the same on all ranks. Gradients of a side that
runs are compared with those of the first one by the norm of every parameter's.
"""

import gc
import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext as nothing
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from pipe_sides import parameters_of, side_of, zero_grad
from torch import Tensor, nn

from muster.pipe.wires import connections, nccl

if TYPE_CHECKING:
    from gpu_sides import Scene, Spec

KINDS = ("pipe", "torch pipe")
SMOKE_SIZES = {"d_model": 16, "d_ff": 32, "layers": 8, "heads": 2}  # blocks enough to be cut
NORMS_WITHIN = 0.03  # of a parameter's norm: bf16 keeps three digits, and micro-batches are summed in it
SMALL = 1e-3  # of the largest norm: what is smaller is not compared


class PipeRunner:
    """One way to run the pipeline."""

    def __init__(self, spec: "Spec", layers: nn.Sequential, scene: "Scene") -> None:
        options: dict[str, Any] = dict(spec.options)
        kind, cut, ctas = options.pop("schedule"), options.pop("cut", "blocks"), options.pop("ctas", None)
        layers = nn.Sequential(OrderedDict(layers.named_children()))  # not our own class of model
        layers = layers.to(torch.float32 if scene.smoke else torch.bfloat16)
        if spec.compiled:
            for layer in layers:
                layer.compile(dynamic=False, backend="eager" if scene.smoke else "inductor")
        if scene.smoke:
            options.pop("cuda_graphs", None)  # of CPUs there are none
        if spec.kind == "torch pipe":
            options["device"] = scene.device
        elif cut == "work":
            options["sized"] = (scene.batch, scene.shape["context"])
        with (
            patch.object(nccl, "CTAS", ctas),
            patch.object(connections, "peers_of", _none) if ctas else nothing(),
        ):
            self.side = side_of(kind, layers, scene.microbatches, copies=scene.copies, **options)
        self.last: Tensor | None = None
        del layers
        if scene.device.type == "cuda":  # the whole model was there, a stage of it stays
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def step(self, index: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run one batch; return its loss, or no number where another rank has it."""
        zero_grad(self.side)
        loss = self.side.step(inputs, targets)
        return torch.tensor(math.nan) if loss is None else loss

    def rest(self) -> None:
        """Do nothing between blocks."""

    def norms(self) -> dict[str, float]:
        """Return the norm of every parameter's gradient, of all stages: a collective."""
        mine = {
            name: math.nan if each.grad is None else float(each.grad.float().norm())
            for name, each in parameters_of(self.side)
        }
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return {name: norm for part in found for name, norm in part.items()}


def _none(*_: Any) -> None:
    """Find no way but NCCL."""


def known_loss(told: list[float]) -> float:
    """Return the loss that some rank knows."""
    return next((loss for loss in told if not math.isnan(loss)), math.nan)


def distances(sides: Mapping[str, object]) -> dict[str, float]:
    """Return how far the gradients of each pipeline are from those of the first one: a collective."""
    norms = {name: side.norms() for name, side in sides.items() if isinstance(side, PipeRunner)}
    return {name: worst_of(found, next(iter(norms.values()))) for name, found in norms.items()}


def worst_of(norms: dict[str, float], reference: dict[str, float]) -> float:
    """Return how far norms are from others, the worst of those that count; infinite where one is missing."""
    if norms.keys() != reference.keys():
        return math.inf
    floor = SMALL * max(reference.values())
    apart = [abs(norms[name] - norm) / norm for name, norm in reference.items() if norm > floor]
    return math.inf if any(math.isnan(each) for each in [*apart, *norms.values()]) else max(apart)
