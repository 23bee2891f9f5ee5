"""How our GPT's layers are split over ranks: the plan for `pipe.tensor.split`.

What is not named is whole on every rank: position embedding, and the biases of attention.output and mlp.down.
"""

from typing import Final

import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.train.models.gpt import Attention
from muster.jobs.train.models.stack import Stack
from muster.pipe.tensor.cross_entropy import SplitCrossEntropy
from muster.pipe.tensor.plan import Column, Heads, Row, Sequence, SequenceStart, Vocabulary
from muster.pipe.tensor.split import Plan, TensorParallel, parallelize
from muster.pipe.tensor.vocabulary import VocabularyLinear

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
    """Split a GPT over the ranks of a group, in place; its loss then is of split logits.

    Raises:
        ValueError: it is no GPT, or heads, d_ff or vocabulary cannot be split over so many ranks.
    """
    if not any(isinstance(part, Attention) for part in model.modules()):
        raise ValueError("tensor parallel splits the layers of a GPT; of other models it has no plan")
    split = parallelize(
        model, GPT_PLAN, group, sequence_parallel=sequence_parallel, sequence_dimension=sequence_dimension
    )
    model.run_loss = split_loss
    return split


def split_loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of what a split head makes of `x`; the whole logits of a row are nowhere."""
    assert isinstance(head, VocabularyLinear)
    return loss_of(head)(head.split(x), targets)


def loss_of(head: VocabularyLinear) -> SplitCrossEntropy:
    """Return the loss of a split head's logits: for a pipeline, whose last stage makes logits first."""
    return SplitCrossEntropy(head.region, head.out_features * head.region.ranks)
