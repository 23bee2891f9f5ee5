"""The reference of `muster verify`: one process that trains on the same shards, without wrapper or engine.

Each step: for every virtual rank in order, run forward and backward on its micro-batches from zero gradients; sum the
shards' gradients from first to last; divide once by their number; clip; step. Batch norm keeps the running statistics
of virtual rank 0.

The reference trains independently or follows a mode. To follow, it computes its own gradients at every step, then steps
with the mode's gradients (see `compare.py`). If the mode splits layers or sequences, it also measures how far
rounding can move the results (`rounding.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from muster.jobs.train.compare import gradient_bound
from muster.jobs.train.data import Data
from muster.jobs.train.data.loading import ShardInput, StepInput, Steps, move
from muster.jobs.train.data.sampling import Plan
from muster.jobs.train.models import model_of
from muster.jobs.train.models.made import layers_of
from muster.jobs.train.numerics import numerics_of
from muster.jobs.train.numerics.optim import (
    clip,
    gradient_of,
    gradients_of,
    learning_rate,
    named_gradients,
    set_learning_rate,
)
from muster.jobs.train.numerics.weighing import own_mean, weights_of
from muster.jobs.train.parallel.syncs import communication_dtype
from muster.jobs.train.rng.layer_seeds import LayerSeeds, forward_seed
from muster.jobs.train.rounding import Rounding, Values
from muster.jobs.train.tensor_draws import draw_as_split
from muster.jobs.world.world import add_in_order
from muster.pipe.rng_streams import seed_generators
from muster.pipe.run import part_lengths

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

USES: Final = 2  # number of uses of a tied weight: in the embedding and in the head
LOSS: Final = "loss of each step"
OUTPUT: Final = "output on test batch"


@dataclass(frozen=True)
class TrainingOutcome:
    """The results of training, with the same fields for the reference and every mode."""

    losses: list[float]  # the loss of each step, over the global batch
    gradients: list[dict[str, Tensor]]  # the gradients of each step: mean over the shards, clipped
    state: dict[str, Tensor]  # parameters and buffers after the last step
    outputs: dict[str, Tensor]  # the model's outputs for one test batch, in evaluation mode


@dataclass(frozen=True)
class Setting:
    """The inputs that mode and reference share: settings, data, plan of batches, number of steps, device."""

    settings: "TrainSettings"
    data: Data
    plan: Plan
    steps: int
    job_steps: int
    device: torch.device
    dtype: torch.dtype
    tensor: int = 1  # number of ranks that split every layer
    shares_weights: bool = False  # the model uses a weight in several places

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(self.settings.schedule, self.settings.optimizer.lr, step, self.job_steps)


class Reference:
    """One process that replaces all ranks."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        settings = setting.settings
        self.numerics = replace(numerics_of(settings, setting.device), recompute=False)
        self.scaler = self.numerics.scaler()
        self.weights = weights_of(settings, setting.device)
        model = model_of(settings, vocabulary=setting.data.vocabulary)
        self.model: nn.Module = self.numerics.place(model)
        draw_as_split(model, setting.tensor, sequence_parallel=settings.sequence_parallel)
        self.names = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        per_layer = settings.is_pipeline and settings.model.draws
        self.seeds = LayerSeeds(layers_of(model, settings), settings.seed) if per_layer else None
        # for pipelines: {parameter: sum of the magnitudes of its gradients over micro-batches}
        self.terms: dict[str, Tensor] = {}
        self.bounds: list[dict[str, float]] = []  # for each step: the allowed differences of gradients
        self.rounding = (
            Rounding(model, settings.seed) if setting.tensor > 1 or settings.mode_name == "terapipe" else None
        )
        self.reach: dict[str, float] = {}  # the differences of losses and output that rounding allows
        self.optimizer = self.numerics.optimizer(self.model.parameters(), settings.optimizer)

    def run(self, test_inputs: Tensor, follow: Sequence[Mapping[str, Tensor]] | None = None) -> TrainingOutcome:
        """Train all steps, with the gradients of `follow` if given; return the results."""
        reader = Steps(self.setting.data, self.setting.plan, range(self.setting.plan.virtual_ranks))
        losses, gradients = [], []
        for step in range(self.setting.steps):
            work = move(reader[step], self.setting.device, self.setting.dtype)
            set_learning_rate(self.optimizer, self.setting.lr(step))
            reach = self._reach(step, work) if follow is not None else {}
            loss_sum, bounds = self._gradients(step, work.shards)
            self.bounds.append({name: bound + reach.get(name, 0.0) for name, bound in bounds.items()})
            losses.append(loss_sum / work.batch.samples)
            gradients.append(named_gradients(self.model))
            if follow is not None:
                for name, parameter in self.names.items():
                    parameter.grad = None if parameter.grad is None else follow[step][name].clone()
            self.scaler.advance(self.optimizer)
        self.model.eval()
        with torch.no_grad():
            if self.rounding is not None and follow is not None:
                self.reach |= self.rounding.reach(lambda: self._outputs(test_inputs))
            outputs = self._outputs(test_inputs)
        return TrainingOutcome(losses, gradients, state_of(self.model), outputs)

    def _outputs(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the model's outputs.

        A pipeline's micro-batches run separately, because on a GPU the batch size affects rounding.
        """
        if not self.setting.settings.is_pipeline:
            return tensors_in(self.numerics.logits(self.model, inputs))
        lengths = part_lengths(len(inputs), self.setting.plan.accumulation)
        return {OUTPUT: torch.cat([self.numerics.logits(self.model, each) for each in torch.split(inputs, lengths)])}

    def _reach(self, step: int, work: StepInput) -> dict[str, float]:
        """Return the largest effect of rounding on each gradient of a step; record the largest effect on losses."""
        if self.rounding is None:
            return {}

        computed_in = torch.promote_types(self.numerics.weights, torch.float32)

        def compute() -> Values:
            loss_sum, _ = self._gradients(step, work.shards)
            return {**named_gradients(self.model), LOSS: torch.tensor(loss_sum / work.batch.samples, dtype=computed_in)}

        buffers = list(self.model.buffers())
        before = [each.clone() for each in buffers]
        found = self.rounding.reach(compute)
        for buffer, value in zip(buffers, before, strict=True):  # repetitions changed batch norm's statistics
            buffer.copy_(value)
        self.reach[LOSS] = max(self.reach.get(LOSS, 0.0), found.pop(LOSS))
        return found

    def _gradients(self, step: int, shards: tuple[ShardInput, ...]) -> tuple[float, dict[str, float]]:
        """Compute the gradients of a step, and store them in the parameters.

        Returns the sum of the losses of its samples, and for each gradient the bound on its difference to another order
        of summation.
        """
        loss_sums, of_shards, terms = list[Tensor](), [], len(shards)
        used: set[str] = set()  # the optimizer skips a parameter that no shard uses
        if self.weights is not None:
            self.weights.begin()
        for shard in shards:
            self.terms.clear()
            loss_sums.append(self._shard(step, shard))
            used |= {name for name, parameter in self.names.items() if parameter.grad is not None}
            of_shards.append([gradient_of(parameter) for parameter in self.names.values()])
        means = [mean_of([each[index] for each in of_shards]) for index in range(len(self.names))]
        if self.terms:  # a pipeline may sum micro-batches and the uses of a tied weight in another order
            terms *= USES * len(shards[0].micro_batches)
            means = [(mean, self.terms[name]) for name, (mean, _) in zip(self.names, means, strict=True)]
        for (name, parameter), (mean, _) in zip(self.names.items(), means, strict=True):
            parameter.grad = mean if name in used else None
        if self.weights is not None:
            loss_sums = self.weights.divide([each for pair in means for each in pair], loss_sums)
        factor = self.scaler.factor()
        self.scaler.unscale(gradients_of(self.names.values()))
        means = [(mean, magnitude / factor) for mean, magnitude in means]
        relative = self._clip([magnitude for _, magnitude in means])
        sent_as = communication_dtype(self.setting.settings)
        bounds = {
            name: gradient_bound(float(magnitude.max()), terms, mean.dtype, sent_as or mean.dtype)
            for name, (mean, magnitude) in zip(self.names, means, strict=True)
        }
        if relative:  # the norm covers all gradients, so the coarsest dtype determines its precision
            coarsest = max((mean.dtype for mean, _ in means), key=lambda each: torch.finfo(each).eps)
            for name, (mean, _) in zip(self.names, means, strict=True):
                by_norm = relative * float(mean.abs().max())
                bounds[name] += gradient_bound(by_norm, terms, coarsest, sent_as or coarsest)
        return add_in_order(map(float, loss_sums)), bounds

    def _clip(self, magnitudes: list[Tensor]) -> float:
        """Clip if asked to; return |m|_2 / |g|_2 for the norm's rounding error (`compare.py`), else 0."""
        norm = self.setting.settings.clip_norm
        if norm is None:
            return 0.0
        before = float(clip(gradients_of(self.names.values()), norm, exact=self.setting.settings.same_norm))
        return float(torch.stack([each.norm() for each in magnitudes]).norm()) / max(before, 1e-30)

    def _shard(self, step: int, shard: ShardInput) -> Tensor:
        """Compute and store one virtual rank's gradients; return the sum of the losses of its samples."""
        self.model.zero_grad(set_to_none=True)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.track_running_stats = shard.virtual_rank == 0
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.setting.device)
        for index, micro in enumerate(shard.micro_batches):
            if self.seeds is not None:
                self.seeds.enter(step, shard.virtual_rank, index)
            elif self.setting.settings.model.draws:
                seed_generators(forward_seed(self.setting.settings.seed, step, shard.virtual_rank, index))
            loss = self.numerics.result(self.model, micro.inputs, micro.targets)
            loss = own_mean(loss, micro.targets) if self.weights is None else self.weights.weighed(loss, micro)
            before = {name: each.grad for name, each in self.names.items()} if self.setting.settings.is_pipeline else {}
            for name in before:
                self.names[name].grad = None
            torch.autograd.backward(self.scaler.scaled(loss if micro.weight == 1.0 else loss * micro.weight))
            self._add(before)
            loss_sum += loss.detach().double() * micro.samples
        return loss_sum

    def _add(self, before: Mapping[str, Tensor | None]) -> None:
        """Add gradients to the earlier ones, as autograd would, and record the sums of their magnitudes."""
        for name, earlier in before.items():
            own = gradient_of(self.names[name])
            self.terms[name] = self.terms[name] + own.abs() if name in self.terms else own.abs()
            if earlier is not None:
                self.names[name].grad = earlier + own


def mean_of(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Add gradients from first to last and divide once; also return the mean of their magnitudes."""
    total, magnitude = gradients[0], gradients[0].abs()
    for gradient in gradients[1:]:
        total, magnitude = total + gradient, magnitude + gradient.abs()
    if len(gradients) == 1:
        return total, magnitude
    return total / len(gradients), magnitude / len(gradients)


def tensors_in(outputs: Any, name: str = OUTPUT) -> dict[str, Tensor]:
    """Return the tensors in a model's outputs by name: in mappings, dataclasses, tuples and lists, at any depth."""
    if isinstance(outputs, Tensor):
        return {name: outputs}
    parts: dict[Any, Any] = {}
    if isinstance(outputs, Mapping):
        parts = dict(outputs)
    elif is_dataclass(outputs):
        parts = {each.name: getattr(outputs, each.name) for each in fields(outputs)}
    elif isinstance(outputs, tuple | list):
        parts = dict(enumerate(outputs))
    return {found: each for key, part in parts.items() for found, each in tensors_in(part, f"{name}, {key}").items()}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Copy parameters and buffers by name, shared ones only once."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}
