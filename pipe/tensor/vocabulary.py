"""A vocabulary split over ranks: each has the rows of some tokens, in the embedding and in the head.

The embedding's ranks look up the tokens that are theirs, and add up: all but one add zeros. The head is a column layer
whose outputs are logits; in training they stay split, for `SplitCrossEntropy`.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.pipe.tensor.cross_entropy import require_within
from muster.pipe.tensor.linear import ColumnLinear
from muster.pipe.tensor.region import Region, outside_graph


class VocabularyEmbedding(nn.Embedding):
    """An embedding with this rank's tokens: tokens (...) to (..., embedding_dim), the same on every rank.

    Raises:
        ValueError: on a CPU, a token is not in the vocabulary.
    """

    region: Region
    vocabulary: int

    def forward(self, input: Tensor) -> Tensor:
        """Map tokens to their rows."""
        require_within(input, self.vocabulary, "token")
        start, _ = self.region.share(self.vocabulary)
        own = input - start
        is_other = (own < 0) | (own >= self.num_embeddings)
        rows = functional.embedding(own.masked_fill(is_other, 0), self.weight)
        rows = rows.masked_fill(is_other[..., None], 0.0)
        return cast(Tensor, outside_graph(_Sum.apply, self.region, rows))


class VocabularyLinear(ColumnLinear):
    """A head with this rank's tokens: (..., in_features) to logits (..., tokens of this rank) in training, else to all.

    `split` gives this rank's in evaluation too.
    """

    def forward(self, input: Tensor) -> Tensor:
        logits = self.split(input)
        return logits if self.training else cast(Tensor, outside_graph(_AllClasses.apply, self.region, logits))

    def split(self, input: Tensor) -> Tensor:
        """Map inputs to this rank's logits."""
        return super().forward(input)


class _Sum(torch.autograd.Function):
    """The sum over ranks of what nobody else needs; its gradient is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, region: Region, x: Tensor) -> Tensor:
        return region.begin_sum(x.clone() if region.ranks > 1 else x)()

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, of_outputs[0]


class _AllClasses(torch.autograd.Function):
    """Every rank's last dimension, side by side; of the gradient, which all ranks have, each takes its part."""

    @staticmethod
    def forward(ctx: Any, region: Region, x: Tensor) -> Tensor:
        ctx.region = region
        return Region(region.group, x.dim() - 1).begin_gather(x)() if region.ranks > 1 else x

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, of_outputs[0].tensor_split(ctx.region.ranks, -1)[ctx.region.rank]
