"""Shared by the benchmarks of `pipe`: a GPT cut into stages, and ways to run it, ours and PyTorch's.

    1f1b, gpipe, interleaved, zb1p, zbv     pipe.Pipeline with the schedule of that name
    torch 1f1b, torch gpipe, ...            torch.distributed.pipelining's schedule of that kind

Where a kind wants two stages a rank, there are twice as many, each with half of the layers: always in PyTorch's
interleaved ones and its zero bubble, in ours interleaved and zbv. Stages have as many blocks each; the first has the
embedding too, the last norm and head. With `copies` pipelines, ranks are numbered as in `pipe.mesh`, and gradients are
averaged in buckets of 100 MB: ours in BucketedDDP during the last backward; PyTorch's in DistributedDataParallel, or
("..., late"; always in its zero bubble, whose weight gradients call no hooks) by one all-reduce of all after the step.
All sides begin with the same weights and leave the mean of the micro-batches' gradients; PyTorch's keeps no outputs,
and its loss stays on the last rank, while ours tells it to all.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from gpu_rows import LARGE_MB
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import build_gpt
from muster.pipe.mesh import Mesh

TORCH_KINDS = {  # PyTorch's class and its stages a rank
    "torch gpipe": ("ScheduleGPipe", 1),
    "torch 1f1b": ("Schedule1F1B", 1),
    "torch interleaved": ("ScheduleInterleaved1F1B", 2),
    "torch zb": ("ScheduleInterleavedZeroBubble", 2),
    "torch zbv": ("ScheduleZBVZeroBubble", 2),
}
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb1p": 1, "zbv": 2}  # ours, stages a rank


class Side(Protocol):
    """A way to run the model by stages."""

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Run forward and backward of a batch; return the mean loss, on the last rank at least."""

    def modules(self) -> Sequence[nn.Module]:
        """List what this rank has of the model, its parameters under their global names."""


@dataclass(frozen=True)
class Task:
    """A model and what a micro-batch of it is."""

    shape: GptShape
    samples: int  # of a micro-batch

    def layers(self) -> nn.Sequential:
        """Return the whole model, the same on every rank: layers by name, not a class of ours."""
        return nn.Sequential(OrderedDict(build_gpt(self.shape, 0).named_children()))

    def batches(self, microbatches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches, the same on every rank and for every side."""
        generator = torch.Generator().manual_seed(1)
        while True:
            size = (microbatches * self.samples, self.shape.context + 1)
            tokens = torch.randint(self.shape.vocabulary, size, generator=generator)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _gpt(width: int, blocks: int, **more: int) -> GptShape:
    sizes = {"heads": 4, "context": 64, "vocabulary": 256, **more}
    return GptShape(f"gpt-{blocks}x{width}", width, 4 * width, blocks, tied=False, norm="layer", **sizes)  # type: ignore[arg-type]


TASKS = {"d128": Task(_gpt(128, 8), 1), "d256": Task(_gpt(256, 8), 4)}
TINY = Task(_gpt(16, 8, heads=2, context=8, vocabulary=32), 1)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (batch, tokens, vocabulary)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def cut_evenly(layers: nn.Sequential, stages: int) -> tuple[int, ...]:
    """Return the first layer of every stage: as many blocks each, the rest where it borders.

    Raises:
        ValueError: stages cannot have as many blocks each.
    """
    blocks = [place for place, (name, _) in enumerate(layers.named_children()) if name.startswith("block")]
    if len(blocks) % stages:
        raise ValueError(f"{len(blocks)} blocks cannot be dealt evenly to {stages} stages")
    return (0, *blocks[:: len(blocks) // stages][1:])


def cut_by_work(layers: nn.Sequential, size: Sequence[int], rank_of: Sequence[int]) -> tuple[tuple[int, ...], Any]:
    """Return the first layer of every stage so that ranks have as much to compute, and what stages then cost."""
    from muster.pipe.boundaries import weights_of
    from muster.pipe.schedules.costs import Costs
    from muster.pipe.schedules.cuts import balanced_ranks

    weights = weights_of(layers, "flops", size)
    cuts = balanced_ranks(weights, rank_of)
    sums = tuple(sum(weights[begin:end]) for begin, end in itertools.pairwise((*cuts, len(layers))))
    return cuts, Costs(sums, sums, sums)  # forward, input gradient, weight gradient: a third each, in one unit


class TorchSide:
    """PyTorch's schedule over its stages."""

    def __init__(
        self,
        kind: str,
        layers: nn.Sequential,
        microbatches: int,
        *,
        groups: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:
        from torch.distributed import pipelining  # 2 s
        from torch.nn.parallel import DistributedDataParallel

        kind, _, late = kind.partition(", ")
        schedule, chunks = TORCH_KINDS[kind]
        pipe = groups and groups.pipe
        rank, ranks = dist.get_rank(pipe), dist.get_world_size(pipe)
        stages = ranks * chunks
        bounds = [*cut_evenly(layers, stages), len(layers)]
        # Zero bubble's second chunk goes back from the last rank to the first: a V.
        mine = [rank, stages - 1 - rank] if kind == "torch zbv" else list(range(rank, stages, ranks))
        self.parts = [layers[bounds[stage] : bounds[stage + 1]] for stage in mine]
        self.averages = groups and (late or "zb" in kind) and groups.data
        wrapped: Sequence[nn.Module] = self.parts
        if groups and not self.averages:
            settings = {"process_group": groups.data, "bucket_cap_mb": LARGE_MB, "gradient_as_bucket_view": True}
            wrapped = [DistributedDataParallel(part, **settings) for part in self.parts]
        built = [
            pipelining.PipelineStage(part, stage, stages, torch.device(device), group=pipe)
            for part, stage in zip(wrapped, mine, strict=True)
        ]
        make = getattr(pipelining, schedule, None) or getattr(pipelining.schedules, schedule)
        self.schedule = make(built if chunks > 1 else built[0], microbatches, loss_fn=mean_loss)
        self.is_first, self.is_last = 0 in mine, stages - 1 in mine

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Run forward and backward of a batch; return the mean loss on the last stage's rank."""
        losses: list[Tensor] = []
        target = {"target": targets, "losses": losses} if self.is_last else {}
        self.schedule.step(*((inputs,) if self.is_first else ()), return_outputs=False, **target)
        if self.averages:
            gradients = [each.grad for part in self.parts for each in part.parameters()]
            dist.all_reduce_coalesced(gradients, group=self.averages)
            torch._foreach_div_(gradients, float(dist.get_world_size(self.averages)))
        return torch.stack(losses).mean().detach() if self.is_last else None

    def modules(self) -> Sequence[nn.Module]:
        """List this rank's stages."""
        return self.parts


class OurSide:
    """Our executor; `settings` are of the pipeline.

    With `sized`, a micro-batch's size, stages are cut by the work of their layers instead, and a zero bubble's table is
    made for what they cost.
    """

    def __init__(
        self,
        kind: str,
        layers: nn.Sequential,
        microbatches: int,
        sized: Sequence[int] | None = None,
        *,
        groups: Any = None,
        **settings: Any,
    ) -> None:
        from muster.pipe.schedules.tables import schedule

        self.kind, self.microbatches, self.settings, self.groups = kind, microbatches, settings, groups
        self.ranks = dist.get_world_size(groups and groups.pipe)
        rank_of = schedule(kind, self.ranks, microbatches, chunks=CHUNKS[kind]).rank_of
        self.cuts, costs = cut_evenly(layers, len(rank_of)), None
        if sized is not None:
            self.cuts, costs = cut_by_work(layers, sized, rank_of)
        self.pipeline = self.build(layers, costs)

    def build(self, layers: nn.Sequential, costs: Any) -> Any:
        """Build the pipeline, its table for what stages cost; of the layers it keeps this rank's."""
        from muster.pipe.pipeline import Pipeline
        from muster.pipe.schedules.tables import schedule

        table = schedule(self.kind, self.ranks, self.microbatches, chunks=CHUNKS[self.kind], costs=costs)
        pipe = self.groups and self.groups.pipe
        built = Pipeline(layers, table, loss=mean_loss, cuts=self.cuts, process_group=pipe, **self.settings)
        if self.groups:  # as `jobs/train/parallel/stages.py` does
            from muster.ddp import BucketedDDP
            from muster.jobs.train.parallel.ready import ReadyGradients

            self.wrapper = BucketedDDP(built.module, self.groups.data, bucket_size_mb=LARGE_MB)
            self.ready = ReadyGradients(built, self.wrapper, ())
            if built.graphs is not None:
                built.graphs.ignores_hooks = True
        return built

    def fit(self, layers: nn.Sequential, batches: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Make a zero bubble's table anew, for what its actions take in the shortest of some steps; a collective.

        Afterwards these layers are trained. Returns the costs, the same on all ranks; None, and nothing is done, where
        no table depends on them.
        """
        from muster.pipe.schedules.measured import mean_costs
        from muster.pipe.timeline import clock_offsets, gather

        if self.pipeline.queue is None:
            return None
        steps, offsets = [], clock_offsets()
        for batch in batches:
            self.step(*batch)
            steps.append(gather(self.pipeline.spans, offsets=offsets) or [])
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            shortest = min(steps, key=lambda records: max(each.end_s for each in records))
            found = [mean_costs([shortest], self.pipeline.schedule)]
        dist.broadcast_object_list(found)
        self.pipeline = self.build(layers, found[0])
        return found[0]

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of a batch; return the mean loss."""
        if not self.groups:
            return self.pipeline.step(inputs, targets)
        with self.wrapper.no_sync():
            loss: Tensor = self.pipeline.step(inputs, targets)
            self.ready.row_is_over()
        self.wrapper.finish_gradient_synchronization()
        return loss

    def modules(self) -> Sequence[nn.Module]:
        """List what this rank has."""
        return [self.pipeline.module]


class LoopSide:
    """The whole model on every rank by itself, micro-batch after micro-batch: what the others must agree with."""

    def __init__(self, layers: nn.Sequential, microbatches: int) -> None:
        self.layers = layers
        self.microbatches = microbatches

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of a batch; return the mean loss."""
        losses = []
        for part, wanted in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True):
            loss = mean_loss(self.layers(part), wanted) / self.microbatches
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def modules(self) -> Sequence[nn.Module]:
        """List the one module."""
        return [self.layers]


def side_of(kind: str, layers: nn.Sequential, microbatches: int, *, copies: int = 1, **settings: Any) -> Side:
    """Build a side; a collective."""
    if copies > 1:
        settings["groups"] = Mesh(data=copies, pipe=dist.get_world_size() // copies).groups()
    if kind.startswith("torch"):
        return TorchSide(kind, layers, microbatches, **settings)
    return OurSide(kind, layers, microbatches, **settings)


def zero_grad(side: Side) -> None:
    """Forget gradients."""
    for module in side.modules():
        module.zero_grad(set_to_none=True)


def parameters_of(side: Side) -> Iterable[tuple[str, nn.Parameter]]:
    """Yield this rank's parameters under their global names."""
    return itertools.chain.from_iterable(module.named_parameters() for module in side.modules())


def whole_gradient(side: Side, layers: nn.Sequential) -> Tensor:
    """Return the gradient of all parameters, end to end, from the ranks that have them: a collective but for a loop."""
    mine = {name: parameter.grad for name, parameter in parameters_of(side)}
    parts = []
    for name, parameter in layers.named_parameters():
        gradient = mine.get(name)
        parts.append(torch.zeros(parameter.numel()) if gradient is None else gradient.detach().flatten())
    flat = torch.cat(parts)
    if not isinstance(side, LoopSide):
        dist.all_reduce(flat)
    return flat
