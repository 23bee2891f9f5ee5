"""Estimates of memory as others have published them, to hold ours against. Pure."""

from typing import Literal

Recomputes = Literal["nothing", "selective", "full"]


def deepspeed_bytes(elements: float, *, zero: int, ranks: int, largest_layer: float = 0.0) -> float:
    """Return what DeepSpeed's estimator says: 2 P + 18 P / N for stage 2, 18 P / N + 4 of the largest layer for 3."""
    if zero == 2:
        return 2 * elements + 18 * elements / ranks
    return 18 * elements / ranks + 4 * largest_layer


def layer_activations(
    batch: int,
    tokens: int,
    width: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence: bool = False,
    recompute: Recomputes = "nothing",
) -> float:
    """Return the bytes that one transformer layer keeps at two bytes an element, dropout's masks included.

    s b h (34 + 5 a s / h); with t tensor ranks s b h (10 + 24 / t + 5 a s / (h t)), with their sequence split too all
    of it over t; selective recomputation keeps no (tokens, tokens) matrix, full recomputation the layer's input alone.

    Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", table 2.
    """
    whole = float(batch * tokens * width)
    if recompute == "full":
        return 2 * whole
    square = 0.0 if recompute == "selective" else 5 * heads * tokens / width
    if sequence:
        return whole * (34 + square) / tensor
    return whole * (10 + 24 / tensor + square / tensor)
