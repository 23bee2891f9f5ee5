"""A GPT-2 of Hugging Face's transformers, from a configuration: nothing is downloaded.

model: {make: model/gpt2.py:build, args: {n_layer: 4, n_head: 4, n_embd: 128, vocab_size: 256}, context: 128}
data: python-source
"""

from typing import Any

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


class Embed(nn.Module):
    """Token and position embeddings, added."""

    def __init__(self, gpt2: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = gpt2.wte, gpt2.wpe, gpt2.drop

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, tokens) to (batch, tokens, n_embd)."""
        return self.drop(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])


class Block(nn.Module):
    """A block whose output is one tensor, because a pipeline's stage sends only one tensor to the next stage."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, n_embd) to the same shape."""
        found = self.block(x)
        return found[0] if isinstance(found, tuple) else found


def build(**config: Any) -> nn.Sequential:
    """Return GPT-2 as layers in their order; its head is its embedding, as in the original."""
    whole = GPT2LMHeadModel(GPT2Config(**config, bos_token_id=None, eos_token_id=None, use_cache=False))
    gpt2 = whole.transformer
    return nn.Sequential(Embed(gpt2), *map(Block, gpt2.h), gpt2.ln_f, whole.lm_head)
