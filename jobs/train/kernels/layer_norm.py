"""LayerNorm (Ba, Kiros and Hinton 2016) by fused Triton kernels, whose result may be narrower than their input.

    r = (mean (x - mean x)^2 + eps)^(-1/2)    one number per row; rows are all but the last dimension
    z = (x - mean x) r
    y = z g + b

The backward, from dy = dL/dy. Each element x_j of a row affects y directly, through the mean and through r:

    dg_i = sum over rows of dy_i z_i
    db_i = sum over rows of dy_i
    dx = r (dy g - mean(dy g) - z mean(dy g z))

Under autocast, PyTorch's LayerNorm returns float32, which the next layer casts to 16 bits; the backward casts the
gradient back. The kernels read and write 16 bits instead: 24 bytes less per element and step.
"""

from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from muster.jobs.train.kernels.rms_norm import why_not_fused

# Of smaller inputs, three launches from Python take the host longer than the kernels save: about 50 us on an H200.
MIN_ELEMENTS: Final = 1 << 23


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension; for large inputs on a GPU, one Triton kernel forward and one backward.

    With `narrow`, only layers that autocast casts read the result, so it has autocast's type. In compiled code, and
    where the kernels do not support the input, this is `nn.LayerNorm`.
    """

    def __init__(self, *args: Any, narrow: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.narrow = narrow

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., n)."""
        if torch.compiler.is_compiling() or x.numel() < MIN_ELEMENTS or self.bias is None or why_not_fused(x):
            return super().forward(x)
        from muster.jobs.train.kernels.norms_triton import FusedNorm

        kind = x.device.type
        narrows = self.narrow and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if narrows else x.dtype
        return cast(Tensor, FusedNorm.apply(x, self.weight, self.bias, self.eps, dtype))  # type: ignore[no-untyped-call]
