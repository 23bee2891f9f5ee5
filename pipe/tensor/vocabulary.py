"""Embedding and head with a vocabulary split over ranks: each rank has the rows of some tokens.

For the embedding, each rank looks up its own tokens, and the results are summed over the ranks. For each token, all
ranks but one add zeros. The head is a column layer whose outputs are logits. In training the logits stay split, for
`SplitCrossEntropy`.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.ddp.compiler import outside
from muster.pipe.tensor.cross_entropy import require_within
from muster.pipe.tensor.linear import ColumnLinear
from muster.pipe.tensor.region import Region


class VocabularyEmbedding(nn.Embedding):
    """An embedding of this rank's tokens. It maps tokens (...) to (..., embedding_dim), the same on every rank.

    Raises:
        ValueError: If a token is outside the vocabulary. This is only checked on CPUs.
    """

    region: Region
    vocabulary: int

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of tokens."""
        require_within(input, self.vocabulary, "token")
        start, _ = self.region.share(self.vocabulary)
        own = input - start
        is_other = (own < 0) | (own >= self.num_embeddings)
        rows = functional.embedding(own.masked_fill(is_other, 0), self.weight)
        rows = rows.masked_fill(is_other[..., None], 0.0)
        return cast(Tensor, outside(_Sum.apply, self.region, rows))


class VocabularyLinear(ColumnLinear):
    """A head for this rank's tokens. It maps (..., in_features) to this rank's logits in training, else to all logits.

    With `split`, it returns only this rank's logits in evaluation, too.
    """

    def forward(self, input: Tensor) -> Tensor:
        logits = self.split(input)
        return logits if self.training else cast(Tensor, outside(_AllClasses.apply, self.region, logits))

    def split(self, input: Tensor) -> Tensor:
        """Map inputs to this rank's logits."""
        return super().forward(input)


class _Sum(torch.autograd.Function):
    """Sum a tensor over ranks. In the backward, every rank already has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, region: Region, x: Tensor) -> Tensor:
        return region.begin_sum(x.clone() if region.ranks > 1 else x)()

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, of_outputs[0]


class _AllClasses(torch.autograd.Function):
    """Concatenate the ranks' tensors along the last dimension. Each rank takes its part of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, region: Region, x: Tensor) -> Tensor:
        ctx.region = region
        return Region(region.group, x.dim() - 1).begin_gather(x)() if region.ranks > 1 else x

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, of_outputs[0].tensor_split(ctx.region.ranks, -1)[ctx.region.rank]
