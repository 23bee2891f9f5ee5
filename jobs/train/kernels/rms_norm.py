"""RMSNorm (Zhang and Sennrich 2019) in plain PyTorch, and as fused Triton kernels.

    r = (mean x^2 + eps)^(-1/2)        one number per row; rows are all but the last dimension
    y = x r g                          g: one weight per column

The backward, from dy = dL/dy. Each element x_j of a row affects y directly and through r. Since dr/dx_j = -r^3 x_j / n
for rows of n elements,

    dg_i = sum over rows of dy_i x_i r
    dx_j = r dy_j g_j - x_j r^3 mean(dy g x)

The kernels compute the last line as r (dy g - x r mean(dy g x r)), because r^3 leaves the range of float32 for large x.
Both compute in float32 at least, and round once at the end. `RMSNorm` of torch is the reference of the tests.
"""

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Final, cast

import torch
from torch import Tensor, nn

from muster.jobs.machine.compilers import lacking

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
WIDEST: Final = 1 << 16  # maximum number of elements in a row, because the kernels load a whole row
_warned: Final = set[str]()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize each row of x (..., n) by its root mean square, and scale it by the weight (n,)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    r = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()  # (..., 1)
    return (wide * r * weight).to(x.dtype)


class FusedRmsNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension, as one Triton kernel forward and one backward.

    If the kernels do not support the input, it runs as `nn.RMSNorm`, and warns once why. Rows that are not contiguous
    are copied first.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., n)."""
        assert self.weight is not None
        assert self.eps is not None
        why = why_not_fused(x)
        if not why:
            from muster.jobs.train.kernels.norms_triton import FusedNorm

            return cast(Tensor, FusedNorm.apply(x, self.weight, None, self.eps, x.dtype))  # type: ignore[no-untyped-call]
        if why not in _warned:
            _warned.add(why)
            warnings.warn(f"rms_fused runs as torch's RMSNorm: {why}", stacklevel=2)
        return super().forward(x)


def why_not_fused(x: Tensor) -> str:
    """Return why the kernels cannot normalize x, or "" if they can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (x.is_cuda or interpreted):
        return f"Triton's kernels need a GPU, x is on {x.device.type}"
    if why := why_no_triton("cpu" if interpreted else "cuda"):
        return why
    if x.dtype not in DTYPES:
        return f"the kernels compute in float32, x is {x.dtype}"
    if x.shape[-1] > WIDEST:
        return f"rows have {x.shape[-1]} elements, the kernels hold at most {WIDEST}"
    return ""


@cache
def why_no_triton(device: str) -> str:
    """Return why Triton cannot run kernels on a type of device, or "". On "cpu", its interpreter runs them."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cuda" and (need := lacking(device)):
        return f"Triton needs {need}"
    return ""
