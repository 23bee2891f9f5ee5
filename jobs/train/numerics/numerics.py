"""One object for all effects of `precision`, `compile` and `activation_checkpointing` on training.

    precision    weights   forward in    gradients   the optimizer updates    the loss is scaled
    fp32, fp64   itself    itself        itself      the weights              no
    bf16         float32   autocast      float32     the weights              no
    fp16         float32   autocast      float32     the weights              yes
    pure_bf16    bfloat16  bfloat16      bfloat16    float32 masters          no

The loss is computed in at least float32. Batch norms stay in float32 under pure_bf16, because running statistics change
in small steps, which rounding to bfloat16's eight bits would lose.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from muster.jobs.train.models.gpt import Attention
from muster.jobs.train.models.stack import LayerStack, head_loss, mean_loss, plain_loss
from muster.jobs.train.models.units import units_of
from muster.jobs.train.numerics.loss import chunked_loss, is_fused
from muster.jobs.train.numerics.masters import MasterWeights
from muster.jobs.train.numerics.optim import build_optimizer
from muster.jobs.train.numerics.pieces import (
    Body,
    by_units,
    compile_layers,
    compiled,
    require_compiler,
)
from muster.jobs.train.numerics.scaling import LossScaler, Scaler
from muster.jobs.train.numerics.weighing import own_mean

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.spec.train_fields import ModelSettings, OptimizerSettings, Precision

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class PrecisionTypes:
    """The dtypes of a precision: that of the weights, and the one that autocast casts to."""

    weights: torch.dtype
    autocast: torch.dtype | None = None


ROWS: Final["dict[Precision, PrecisionTypes]"] = {
    "fp32": PrecisionTypes(torch.float32),
    "fp64": PrecisionTypes(torch.float64),
    "bf16": PrecisionTypes(torch.float32, torch.bfloat16),
    "fp16": PrecisionTypes(torch.float32, torch.float16),
    "pure_bf16": PrecisionTypes(torch.bfloat16),
}


@dataclass(frozen=True)
class Numerics:
    """The numerics settings of one rank."""

    precision: "Precision"
    device: torch.device
    compile: bool = False
    recompute: bool = False  # blocks are recomputed in the backward
    cut_anywhere: bool = False  # the optimizer's rounding must not depend on where parameters are cut into shards
    by_layer: bool = False  # each layer is compiled on its own, so that the hooks of `zero` stay outside
    shows_skipped: bool = False  # metrics rows show which steps were skipped
    made: "ModelSettings | None" = None  # set for a user's model, which is compiled and recomputed unit by unit
    chunked: bool = True  # with bfloat16, and with float32 on GPUs, compute the head of a GPT and its loss in chunks

    @property
    def weights(self) -> torch.dtype:
        """The dtype of parameters, except those of batch norms under pure_bf16."""
        return ROWS[self.precision].weights

    @property
    def inputs(self) -> torch.dtype:
        """The dtype of floating-point inputs."""
        return self.weights

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype that autocast casts to; None without autocast."""
        return ROWS[self.precision].autocast

    def place(self, model: M) -> M:
        """Move a model to its device and dtypes, and set it up to be compiled or recomputed.

        The model is changed in place, and its parameters keep their names.

        Raises:
            RefusedError: if this machine lacks a needed compiler, or the model has no unit to recompute.
        """
        if self.compile:
            require_compiler(self.device)
        model.to(self.device, self.weights)
        for module in model.modules():
            if isinstance(module, _NormBase) and self.weights.itemsize == 2:
                module.float()
        if self.made is not None:
            by_units(model, units_of(model, self.made), compile=self.compile, recompute=self.recompute)
        elif isinstance(model, LayerStack):
            self._place_own(model)
        return model

    def _place_own(self, model: LayerStack) -> None:
        if self.compile and self.by_layer:
            compile_layers(list(model))
        in_pieces = self.compile and not self.by_layer
        if in_pieces or self.recompute:
            model.run_body = Body(model, compile=in_pieces, recompute=self.recompute)
        model.run_loss = self._loss_of(model)

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context for every forward, in training and evaluation. The backward runs outside of it."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)

    def loss(self, call: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a model or its wrapper."""
        return own_mean(self.result(call, inputs, targets), targets)

    def result(self, call: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a model or its wrapper, or a packed `CountedLoss`."""
        with self.forward():
            loss: Tensor = call(inputs, targets)
        return loss

    def logits(self, call: Callable[..., Any], inputs: Tensor) -> Tensor:
        """Return the logits of a model."""
        with self.forward():
            logits: Tensor = call(inputs)
        return logits

    def optimizer(
        self, parameters: Iterable[nn.Parameter], settings: "OptimizerSettings", *, capturable: bool = False
    ) -> torch.optim.Optimizer:
        """Build the job's optimizer. With `capturable`, a CUDA graph can contain its step.

        Its learning rate is then a tensor on the device.
        """
        build = partial(build_optimizer, settings=settings, capturable=capturable, cut_anywhere=self.cut_anywhere)
        return MasterWeights(parameters, build) if self.weights.itemsize == 2 else build(parameters)

    def scaler(self) -> Scaler:
        """Return the loss scaler, which also skips steps with non-finite gradients. Except for fp16, its scale is 1."""
        fp16 = self.autocast == torch.float16
        return LossScaler(self.device) if fp16 else Scaler(self.device, shows_skipped=self.shows_skipped)

    def _loss_of(self, model: LayerStack) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        if "run_loss" in vars(model):  # the loss function that the job names
            return model.run_loss
        is_gpt = any(isinstance(module, Attention) for module in model.modules())
        low = torch.bfloat16 in (self.weights, self.autocast)
        if (low or (self.precision == "fp32" and is_fused(self.device.type))) and self.chunked and is_gpt:
            return partial(chunked_loss, compile=self.compile)
        if not self.compile:
            return plain_loss
        if self.by_layer:
            return partial(head_loss, compiled(mean_loss, "loss"))
        return compiled(plain_loss, "loss")


def numerics_of(settings: "TrainSettings", device: torch.device) -> Numerics:
    """Return the numerics of a job on a device."""
    return Numerics(
        settings.precision,
        device,
        settings.compile,
        settings.activation_checkpointing,
        # not needed with exact, which cuts shards at multiples of the vector size
        cut_anywhere=settings.deterministic and not settings.exact,
        shows_skipped=settings.non_finite == "skip",
        by_layer=settings.sync == "sharded",
        made=settings.model if settings.model.make is not None else None,
        # A pipeline computes head and loss in two steps, and a split head has its own loss.
        chunked=not settings.is_pipeline and not settings.splits_layers,
    )
