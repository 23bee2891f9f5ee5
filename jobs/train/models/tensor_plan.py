"""How layers are split over ranks: the plan of Muster's GPT for `pipe.tensor.split`, and a user's plan.

Modules that a plan does not name are whole on every rank: position embedding, biases of attention.output and mlp.down.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.models.gpt import Attention
from muster.jobs.train.models.made import give_loss
from muster.jobs.train.models.stack import Stack
from muster.jobs.user import code
from muster.pipe.tensor.cross_entropy import SplitCrossEntropy
from muster.pipe.tensor.plan import Column, Heads, Row, Sequence, SequenceStart, Vocabulary
from muster.pipe.tensor.split import Plan, TensorParallel, parallelize
from muster.pipe.tensor.vocabulary import VocabularyLinear

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

GPT_PLAN: Final[Plan] = {
    "embed.token": Vocabulary(),
    "embed": SequenceStart(),
    "block*.norm*": Sequence(),
    "block*.attention": Heads("heads", ("query", "key", "value"), through="project", dropout="dropout"),
    "block*.attention.output": Row(),
    "block*.mlp.up": Column(),
    "block*.mlp.down": Row(),
    "block*.dropout": Sequence(),
    "norm": Sequence(),
    "head": Vocabulary(),
}


def split_gpt(
    model: Stack, group: dist.ProcessGroup | None, *, sequence_parallel: bool = False, sequence_dimension: int = 1
) -> TensorParallel:
    """Split a GPT over the ranks of a group, in place. Its loss then uses split logits.

    Raises:
        ValueError: if it is not a GPT, or heads, d_ff or vocabulary cannot be split over this many ranks.
    """
    if not any(isinstance(part, Attention) for part in model.modules()):
        raise ValueError("tensor parallel splits the layers of a GPT; it has no plan for other models")
    split = parallelize(
        model, GPT_PLAN, group, sequence_parallel=sequence_parallel, sequence_dimension=sequence_dimension
    )
    model.run_loss = split_loss
    return split


def split_made(model: nn.Module, settings: "TrainSettings", group: dist.ProcessGroup | None) -> TensorParallel:
    """Split a user's model by the user's plan over the ranks of a group, in place.

    Raises:
        RefusedError: if it is not a plan, or it splits the logits that a user's loss needs whole.
        ValueError: if layers cannot be split like this.
    """
    text = settings.model.plan
    split = parallelize(model, plan_of(model, settings), group, sequence_parallel=settings.sequence_parallel)
    heads = [each for each in model.modules() if isinstance(each, VocabularyLinear)]
    if heads and settings.loss is not None:
        raise RefusedError(
            f"train.loss: {settings.loss} needs whole logits, but model.plan {text} splits them by Vocabulary(); "
            "plan the head as Row() or omit it, or remove loss"
        )
    if heads:
        give_loss(model, loss_of(heads[-1]))
    return split


def plan_of(model: nn.Module, settings: "TrainSettings") -> Plan:
    """Call the user's function for the plan of a user's model.

    Raises:
        RefusedError: if it cannot be called, raises, or does not return a plan.
    """
    text = settings.model.plan
    assert text is not None
    plan = code.called("train.model.plan", text, code.load("train.model.plan", text, Path.cwd()), model)
    if not isinstance(plan, Mapping):
        raise RefusedError(f"train.model.plan: {text} returned a {type(plan).__name__}; return names with rows")
    return plan


def split_loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a split head's output for `x`. No rank ever has the whole logits of a row."""
    assert isinstance(head, VocabularyLinear)
    return loss_of(head)(head.split(x), targets)


def loss_of(head: VocabularyLinear) -> SplitCrossEntropy:
    """Return the loss of a split head's logits, for a pipeline, whose last stage computes the logits first."""
    return SplitCrossEntropy(head.region, head.out_features * head.region.ranks)
