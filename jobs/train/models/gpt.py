"""A decoder-only transformer: learned positions, pre-norm blocks, causal attention, a GELU MLP.

Each block has six matrices and two norms, as in Stanford CS336: query, key, value and output of the attention, up and
down of the MLP.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.kernels.layer_norm import FusedLayerNorm
from muster.jobs.train.kernels.rms_norm import FusedRmsNorm
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.rng.keyed import INITIALISE, key
from muster.pipe.token_slices import first_token, with_earlier_tokens

EPSILON = 1e-5
WEIGHT_STD = 0.02
NORMS: Final[dict[str, type[nn.Module]]] = {"layer": FusedLayerNorm, "rms": nn.RMSNorm, "rms_fused": FusedRmsNorm}


class Embed(nn.Module):
    """Token and position embeddings, added."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.d_model)
        self.position = nn.Embedding(shape.context, shape.d_model)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, tokens), at most `context` of them, to (batch, tokens, d_model)."""
        begin = first_token()  # 0, unless a pipeline cuts sequences into slices
        x = self.token(tokens) + self.position.weight[begin : begin + tokens.shape[1]]  # (batch, tokens, d_model)
        return cast(Tensor, self.dropout(x))


class Attention(nn.Module):
    """Causal self-attention with `heads` heads, each on a slice of the width."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.query = nn.Linear(shape.d_model, shape.d_model, bias=shape.bias)
        self.key = nn.Linear(shape.d_model, shape.d_model, bias=shape.bias)
        self.value = nn.Linear(shape.d_model, shape.d_model, bias=shape.bias)
        self.output = nn.Linear(shape.d_model, shape.d_model, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with earlier ones. Input and output are (batch, tokens, d_model)."""
        query, key, value = self.project(x)
        keys, values = with_earlier_tokens(self._split(key), self._split(value))
        mixed = self.mix(self._split(query), keys, values)  # (batch, heads, tokens, width)
        return cast(Tensor, self.output(mixed.transpose(1, 2).flatten(2)))  # (batch, tokens, d_model)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and values. Tensor parallelism replaces this method to compute all three at once."""
        x = in_autocast(x)
        return self.query(x), self.key(x), self.value(x)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply attention. Inputs and output are (batch, heads, tokens, width). There may be keys of earlier tokens."""
        dropout = self.dropout if self.training else 0.0
        attend = partial(functional.scaled_dot_product_attention, query, key, value, dropout_p=dropout)
        earlier = key.shape[2] - query.shape[2]
        if not earlier:
            return attend(is_causal=True)
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(earlier)
        return attend(attn_mask=mask)

    def _split(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, self.heads, -1).transpose(1, 2)  # (batch, heads, tokens, width)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map each position separately. Input and output are (batch, tokens, d_model)."""
        return cast(Tensor, self.down(functional.gelu(self.up(x))))


class TransformerBlock(nn.Module):
    """Attention, then MLP, each applied to the normed input and added to the residual."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.norm1 = _norm(shape, narrow=True)
        self.attention = Attention(shape)
        self.norm2 = _norm(shape, narrow=True)
        self.mlp = Mlp(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, d_model) to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return cast(Tensor, x + self.dropout(self.mlp(self.norm2(x))))


def in_autocast(x: Tensor) -> Tensor:
    """Cast an input of several layers as autocast would, so that it is cast once instead of once for each layer."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):  # the meta device has no autocast
        return x
    return x.to(torch.get_autocast_dtype(kind))


def build_gpt(shape: GptShape, seed: int) -> LayerStack:
    """Build embed, block1, ... norm, head: tokens (batch, context) in, logits (batch, context, vocabulary) out."""
    with torch.random.fork_rng(devices=[]):  # layers draw initial values, which are overwritten below
        model = assemble_gpt(shape)
    _initialise(model, shape.layers, torch.Generator().manual_seed(key(seed, INITIALISE)))
    return model


def assemble_gpt(shape: GptShape) -> LayerStack:
    """Assemble the layers with arbitrary values; a tied head shares the embedding's weight."""
    embed = Embed(shape)
    head = nn.Linear(shape.d_model, shape.vocabulary, bias=shape.bias and not shape.tied)
    if shape.tied:
        head.weight = embed.token.weight
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=embed)
    for block in range(1, shape.layers + 1):
        layers[f"block{block}"] = TransformerBlock(shape)
    layers["norm"] = _norm(shape)
    layers["head"] = head  # (batch, tokens, vocabulary)
    stack = LayerStack(layers)
    stack.shape = shape
    return stack


def _norm(shape: GptShape, *, narrow: bool = False) -> nn.Module:
    """Build a norm. The result of a narrow one is read by layers only that autocast casts."""
    norm = NORMS[shape.norm](shape.d_model, eps=EPSILON)
    if narrow and isinstance(norm, FusedLayerNorm):
        norm.narrow = True
    return norm


def _initialise(model: nn.Module, layers: int, generator: torch.Generator) -> None:
    """Initialise as in GPT-2: matrices normal(0, 0.02), smaller before a residual addition, biases 0, norms 1."""
    # Each block adds to the residual twice. This keeps the variance of the total near that of one addition.
    residual_std = WEIGHT_STD / math.sqrt(2 * layers)
    for name, parameter in model.named_parameters():  # yields a shared weight once
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            nn.init.normal_(parameter, std=residual_std, generator=generator)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=WEIGHT_STD, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
