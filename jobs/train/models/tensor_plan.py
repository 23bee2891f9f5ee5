"""Split layers over ranks by a plan for `pipe.tensor.split`: that of Muster's GPT, or a user's.

Every rank has whole copies of modules that a plan does not name, such as the position embedding, and of Row's biases.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.models.gpt import Attention
from muster.jobs.train.models.made import give_loss
from muster.jobs.train.models.stack import LayerStack
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
    model: LayerStack, group: dist.ProcessGroup | None, *, sequence_parallel: bool = False, sequence_dimension: int = 1
) -> TensorParallel:
    """Split a GPT over the ranks of a group, in place. Its loss then uses split logits.

    Raises:
        ValueError: if the model is not a GPT, or heads, d_ff or vocabulary cannot be split over this many ranks.
    """
    if not any(isinstance(part, Attention) for part in model.modules()):
        raise ValueError("tensor parallelism splits the layers of a GPT; it has no plan for other models")
    split = parallelize(
        model, GPT_PLAN, group, sequence_parallel=sequence_parallel, sequence_dimension=sequence_dimension
    )
    model.run_loss = split_loss
    return split


def split_made(model: nn.Module, settings: "TrainSettings", group: dist.ProcessGroup | None) -> TensorParallel:
    """Split a user's model by the user's plan over the ranks of a group, in place.

    Raises:
        RefusedError: if the user's function does not return a plan, or a user's loss needs logits that the plan splits.
        ValueError: if layers cannot be split as planned.
    """
    text = settings.model.plan
    split = parallelize(model, plan_of(model, settings), group, sequence_parallel=settings.sequence_parallel)
    heads = [each for each in model.modules() if isinstance(each, VocabularyLinear)]
    if heads and settings.loss is not None:
        raise RefusedError(
            f"train.loss: {settings.loss} needs whole logits, but model.plan {text} splits them by Vocabulary(); "
            "split the head by Row(), leave it out of the plan, or remove loss"
        )
    if heads:
        give_loss(model, loss_of(heads[-1]))
    return split


def plan_of(model: nn.Module, settings: "TrainSettings") -> Plan:
    """Call the user's function, which returns the plan of a user's model.

    Raises:
        RefusedError: if the function cannot be called, raises, or does not return a plan.
    """
    text = settings.model.plan
    assert text is not None
    plan = code.called("train.model.plan", text, code.load("train.model.plan", text, Path.cwd()), model)
    if not isinstance(plan, Mapping):
        raise RefusedError(
            f"train.model.plan: {text} returned a {type(plan).__name__}; return a dict of module names and rows"
        )
    return plan


def split_loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a split head's output for `x`. No rank ever has all logits of a token."""
    assert isinstance(head, VocabularyLinear)
    return loss_of(head)(head.split(x), targets)


def loss_of(head: VocabularyLinear) -> SplitCrossEntropy:
    """Return the loss function for the logits of a split head. A pipeline calls it on its last stage."""
    return SplitCrossEntropy(head.region, head.out_features * head.region.ranks)
