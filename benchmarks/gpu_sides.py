"""The sides of `gpu_throughput.py`: one model, one stream of batches, and ways to train it.

    torch      the loop that people write: autocast, PyTorch's DistributedDataParallel, fused optimizer
    bucketed   the same loop with our BucketedDDP in its place
    engine     our training engine, as a job file would set it up
    zero1, zero2, zero3   our ShardedDataParallel and its optimizer; with pure_bf16 its shards have float32 masters
    torch zero            PyTorch's DistributedDataParallel and ZeroRedundancyOptimizer, which broadcasts parameters
                          where they lie
    torch fsdp            PyTorch's fully_shard of every block and of the whole; pure_bf16 means float32 parameters that
                          are gathered in bfloat16 (MixedPrecisionPolicy), with gradients that are summed in `reduce`
    pipe, torch pipe      in stages: gpu_pipes.py

All are given fused optimizers; blocks are the units of sharding. All sides of a row begin with the same weights and see
the same batches, so their losses can be compared.
"""

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import gpu_pipes
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from train_sides import STAGES, fully_sharded, torch_ddp, zero_redundancy

from muster.ddp import BucketedDDP
from muster.zero import ShardedDataParallel

BATCHES = 4  # different ones, in turn
LEARNING_RATE = {"gpt": 3e-4, "vgg": 0.01}
ANCHOR = {"context": 1024, "vocabulary": 50304, "tied": False, "bias": True, "norm": "layer"}
STOCK = {"context": 128, "vocabulary": 256, "tied": True, "bias": False, "norm": "rms"}
SMOKE = {"context": 32, "vocabulary": 64, "tied": False, "bias": True, "norm": "layer"}


@dataclass(frozen=True)
class Spec:
    """One side: what it is called and how it is put together."""

    name: str
    kind: str  # of those above
    precision: str = "bf16"  # fp32, bf16 (autocast), pure_bf16 (weights too; the engine keeps fp32 masters)
    compiled: str = ""  # "", whole, inside (DDP compiled around the model, split at its buckets), blocks;
    # overhead, overhead inside: whole and inside, with torch.compile's CUDA graphs
    graph: bool | str = False  # cuda_graph of the job file
    alone: bool = False  # on the first GPU, by itself
    held: bool = False  # True: the side of ours that is held to reach
    options: tuple[tuple[str, Any], ...] = ()  # of the wrapper; of an engine: settings of the job file
    numerics: tuple[tuple[str, Any], ...] = ()  # of an engine: what no job file sets
    apart: bool = False  # on every GPU by itself, at the same time
    ctas: int = 0  # of an engine: thread blocks of NCCL's kernels; 0: NCCL chooses


@dataclass(frozen=True)
class Scene:
    """What all sides of a row share on one rank."""

    model: str
    batch: int  # samples a GPU; of a pipeline's micro-batch
    rank: int
    ranks: int
    device: torch.device
    smoke: bool = False
    stock: bool = False  # a GPT as a job file has it without a word on its shape
    microbatches: int = 0  # of a pipeline
    copies: int = 1  # of the pipeline

    @property
    def is_gpt(self) -> bool:
        """True for a model that reads tokens."""
        return self.model.startswith("gpt")

    @property
    def units(self) -> int:
        """Tokens, or images, of a step on one GPU."""
        samples = self.batch * self.microbatches * self.copies / self.ranks if self.microbatches else self.batch
        return round(samples * (self.shape["context"] if self.is_gpt else 1))

    @property
    def shape(self) -> dict[str, Any]:
        """What the model is beside its name."""
        if not self.is_gpt:
            return {}
        if self.smoke:
            return SMOKE | (gpu_pipes.SMOKE_SIZES if self.microbatches else {})
        return STOCK if self.stock else ANCHOR

    def alone(self) -> "Scene":
        """The same with nobody else."""
        return replace(self, ranks=1)


def build_model(scene: Scene) -> nn.Sequential:
    """Build the model on the device, the same weights every time."""
    from muster.jobs.models.model_shape import resolve_shape
    from muster.jobs.spec.train_fields import ModelSettings
    from muster.jobs.train.models.gpt import assemble_gpt
    from muster.jobs.train.models.vgg import assemble_vgg

    settings = ModelSettings(name=None if "layers" in scene.shape else scene.model, **scene.shape)
    shape = resolve_shape(settings, scene.shape["vocabulary"] if scene.is_gpt else 10)
    with torch.device(scene.device):
        model: nn.Sequential = assemble_gpt(shape) if scene.is_gpt else assemble_vgg(shape)  # type: ignore[arg-type]
    generator = torch.Generator(scene.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                fan_in = parameter[0].numel()
                std = 0.02 if scene.is_gpt else (2.0 / fan_in) ** 0.5
                parameter.normal_(std=std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
    return model


def batches_of(scene: Scene) -> list[tuple[Tensor, Tensor]]:
    """Draw this rank's batches: (inputs, targets) on the device; of a pipeline all ranks have the same."""
    generator = torch.Generator(scene.device).manual_seed(100 + (0 if scene.microbatches else scene.rank))
    samples = scene.batch * max(1, scene.microbatches)
    drawn = []
    for _ in range(BATCHES):
        if scene.is_gpt:
            size = (samples, scene.shape["context"] + 1)
            tokens = torch.randint(scene.shape["vocabulary"], size, generator=generator, device=scene.device)
            drawn.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        else:
            images = torch.randn(scene.batch, 3, 32, 32, generator=generator, device=scene.device)
            drawn.append((images, torch.randint(10, (scene.batch,), generator=generator, device=scene.device)))
    return drawn


class WithLoss(nn.Module):
    """A model that returns its mean loss: so the whole of it can be compiled, or block by block and the end as one."""

    def __init__(self, model: nn.Sequential, blocks: "Callable[[Any], Any] | None" = None) -> None:
        super().__init__()
        self.model = model
        self.blocks = None
        if blocks is not None:
            self.blocks = [blocks(layer) for layer in list(model.children())[:-2]]
            self.tail = blocks(end_loss)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Map inputs and targets to the mean cross-entropy."""
        if self.blocks is None:
            return end_loss(None, None, self.model(inputs), targets)
        x = inputs
        for block in self.blocks:
            x = block(x)
        *_, norm, head = self.model.children()
        loss: Tensor = self.tail(norm, head, x, targets)
        return loss


def own_class(name: str) -> type[WithLoss]:
    """Return a class with code of its own: what is compiled is kept by code object, and two sides must not share it."""
    function = WithLoss.forward
    code = function.__code__.replace(co_name="forward_" + re.sub(r"\W+", "_", name))
    forward = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return type("WithLoss", (WithLoss,), {"forward": forward})


def end_loss(norm: nn.Module | None, head: nn.Module | None, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits, or of what is left to be normed and multiplied by the head."""
    if norm is not None and head is not None:
        x = head(norm(x))
    return F.cross_entropy(x.flatten(0, -2), targets.flatten())


class Side(ABC):
    """A way to train; `step` runs one step on a batch and returns its loss."""

    @abstractmethod
    def step(self, index: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train once."""

    def rest(self) -> None:  # noqa: B027 - only the engine has something to do
        """Do between blocks what a loop does at its log points."""


class LoopSide(Side):
    """The loop that people write."""

    def __init__(self, spec: Spec, scene: Scene) -> None:
        # Not our own class of model: only its layers.
        model = nn.Sequential(OrderedDict(build_model(scene).named_children()))
        if spec.precision == "pure_bf16" and spec.kind != "torch fsdp":  # which makes bfloat16 of them itself
            model = model.to(torch.bfloat16)
        self.dtype = torch.bfloat16 if spec.precision == "pure_bf16" else torch.float32
        compiler = compile_for(scene, "reduce-overhead" if "overhead" in spec.compiled else None)
        with_loss: nn.Module = own_class(spec.name)(model, compiler if spec.compiled == "blocks" else None)
        if spec.compiled in ("whole", "overhead"):
            with_loss = compiler(with_loss)
        wrapped, self.optimizer = self._wrapped(spec, model, with_loss, scene)
        self.forward = compiler(wrapped) if spec.compiled.endswith("inside") else wrapped
        self.autocast = spec.precision == "bf16"
        self.device = scene.device

    def _wrapped(self, spec: Spec, model: nn.Module, with_loss: nn.Module, scene: Scene) -> tuple[nn.Module, Any]:
        kind, settings = optimizer_of(scene)
        options: dict[str, Any] = dict(spec.options)
        if scene.ranks > 1 and spec.kind in STAGES:
            sharded = ShardedDataParallel(with_loss, stage=STAGES[spec.kind], units=blocks_of(with_loss), **options)  # type: ignore[arg-type]
            return sharded, sharded.optimizer(kind, **settings)
        if scene.ranks > 1 and spec.kind == "torch fsdp":
            reduce = getattr(torch, options.pop("reduce", "bfloat16"))
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce) if spec.precision == "pure_bf16" else None
            fully_sharded(
                with_loss,
                [[each] for each in blocks_of(with_loss)],
                mp_policy=policy or MixedPrecisionPolicy(),
                **options,
            )
            return with_loss, kind(with_loss.parameters(), **settings)
        wrapped = with_loss if scene.ranks == 1 else wrap(spec, with_loss, scene)
        if scene.ranks > 1 and spec.kind == "torch zero":  # its options are of the wrapper
            return wrapped, zero_redundancy(model, kind, parameters_as_bucket_view=True, **settings)
        return wrapped, kind(model.parameters(), **settings)

    def step(self, index: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train once."""
        self.optimizer.zero_grad(set_to_none=True)
        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        with self._context():
            loss = self.forward(inputs, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """List the blocks of a GPT; of another model there are none."""
    return [each for name, each in module.named_modules() if name.rpartition(".")[2].startswith("block")]


def compile_for(scene: Scene, mode: str | None = None) -> Callable[[Any], Any]:
    """Return how this row compiles; a smoke run only goes through the motions."""
    if scene.smoke:
        return lambda what: torch.compile(what, dynamic=False, backend="eager")
    return lambda what: torch.compile(what, dynamic=False, mode=mode)


def optimizer_of(scene: Scene) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the fused optimizer that fits the model, and its settings."""
    if scene.is_gpt:
        adamw = {"lr": LEARNING_RATE["gpt"], "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        return torch.optim.AdamW, adamw
    return torch.optim.SGD, {"lr": LEARNING_RATE["vgg"], "momentum": 0.9, "fused": True}


def wrap(spec: Spec, module: nn.Module, scene: Scene) -> nn.Module:
    """Put a module into PyTorch's wrapper or ours."""
    if spec.kind == "bucketed":
        ours: dict[str, Any] = dict(spec.options)
        return BucketedDDP(module, dist.group.WORLD, **ours)
    ids = [scene.device.index] if scene.device.type == "cuda" else None
    return torch_ddp(module, buffers=False, device_ids=ids, **dict(spec.options))


class EngineSide(Side):
    """Our engine, set up as the job file's `train:` would be."""

    def __init__(self, spec: Spec, scene: Scene) -> None:
        from muster.jobs.spec.train import TrainSettings
        from muster.jobs.train.engine import build_engine
        from muster.jobs.train.numerics import numerics_of
        from muster.jobs.train.profiling.clock import clock_for
        from muster.jobs.world.world import World

        world = World(
            scene.rank if scene.ranks > 1 else 0,
            scene.ranks,
            group_of(spec.ctas) if scene.ranks > 1 else None,
            scene.device,
        )
        settings = TrainSettings.model_validate(settings_of(spec, scene))
        self.clock = clock_for(scene.device)
        self.rank = world.rank
        numerics = replace(numerics_of(settings, scene.device), **dict(spec.numerics))
        self.dtype = numerics.inputs
        self.engine = build_engine(settings, numerics.place(build_model(scene)), world, self.clock, numerics)

    def step(self, index: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train once."""
        from muster.jobs.train.data.loading import MicroInput, ShardInput

        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        self.clock.start()
        samples = inputs.shape[0]
        shard = ShardInput(self.rank, (MicroInput(inputs, targets, samples, 1.0),))
        losses = self.engine.train_step(index, (shard,))
        self.clock.stop()
        return losses[0] / samples

    def rest(self) -> None:
        """Read the marks of the steps so far."""
        self.clock.take()


class PipeSide(gpu_pipes.PipeRunner, Side):
    """A pipeline over all ranks."""

    def __init__(self, spec: Spec, scene: Scene) -> None:
        super().__init__(spec, build_model(scene), scene)


def group_of(ctas: int) -> dist.ProcessGroup | None:
    """Return a group of all ranks whose kernels have `ctas` thread blocks, if NCCL can; 0: the default group."""
    if not ctas or not torch.cuda.is_available():
        return dist.group.WORLD
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = ctas
    group: dist.ProcessGroup = dist.new_group(pg_options=options)
    return group


def settings_of(spec: Spec, scene: Scene) -> dict[str, Any]:
    """Spell a side as the `train:` section of a job file."""
    adamw = {"name": "adamw", "lr": LEARNING_RATE["gpt"], "weight_decay": 0.1, "betas": [0.9, 0.95]}
    sgd = {"name": "sgd", "lr": LEARNING_RATE["vgg"], "momentum": 0.9}
    return {
        "model": {"name": scene.model, **scene.shape},
        "data": "synthetic",
        "mode": "bucketed" if scene.ranks > 1 else "single",
        "batch_size": scene.batch * scene.ranks,
        "steps": 1000,
        "optimizer": adamw if scene.is_gpt else sgd,
        "precision": spec.precision,
        "compile": bool(spec.compiled),
        "cuda_graph": spec.graph,
        **dict(spec.options),
    }


def build_side(spec: Spec, scene: Scene) -> Side:
    """Build one side: a collective, unless it trains alone."""
    if spec.kind in gpu_pipes.KINDS:
        return PipeSide(spec, scene)
    scene = scene.alone() if spec.alone or spec.apart else scene
    return EngineSide(spec, scene) if spec.kind == "engine" else LoopSide(spec, scene)
