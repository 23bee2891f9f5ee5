"""Optimizers that can step shards, because they update each element from that element's gradient and state alone.

Other optimizers use a whole tensor (its norm, rows or products), so their results for a part of it would differ.
"""

from typing import Final

import torch

_ELEMENTWISE: Final = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_WHOLE: Final = {  # the reason why each of these optimizers needs whole tensors
    "Adafactor": "it factors the second moment of a matrix into its rows and columns",
    "LBFGS": "it computes products of all gradients, and evaluates the loss again",
    "Muon": "it orthogonalizes the momentum of a whole matrix",
    "SparseAdam": "it updates only the rows of a sparse gradient, but shards of gradients are dense",
}


def require_elementwise(kind: type[torch.optim.Optimizer]) -> None:
    """Check that an optimizer can step shards.

    For torch's own optimizers, a table decides. Any other class passes if it inherits the `step` of an element-wise
    optimizer, or has the attribute `elementwise = True`.

    Raises:
        ValueError: If the optimizer needs whole tensors, or might need them.
        TypeError: If `optimizer_cls` is not an optimizer class.
    """
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        what = kind.__name__ if isinstance(kind, type) else f"a {type(kind).__name__}"
        raise TypeError(f"optimizer_cls must be a class of torch.optim.Optimizer, got {what}; pass the class itself")
    if getattr(kind, "elementwise", False):
        return
    stepper = next((each for each in kind.__mro__ if "step" in vars(each)), kind)
    own = stepper.__module__.startswith("torch.optim")
    if own and stepper.__name__ in _ELEMENTWISE:
        return
    if own and stepper.__name__ in _WHOLE:
        raise ValueError(
            f"{kind.__name__} cannot step shards: {_WHOLE[stepper.__name__]}; "
            f"use an element-wise optimizer ({', '.join(_ELEMENTWISE)}), or do not shard its state"
        )
    raise ValueError(
        f"{kind.__name__} has its own step, which may need whole tensors; "
        "if it updates each element from that element's gradient and state alone, set elementwise = True on the class"
    )
