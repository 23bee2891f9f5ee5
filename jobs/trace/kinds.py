"""Classify operators and kernels by name, using the first matching row of a table."""

import re
from functools import cache
from typing import Final

MATMUL: Final = "matmul"
COMMUNICATION: Final = "communication"
OTHER: Final = "other"

_TABLE: Final = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("python", r"\.py\(\d+\)"),  # first, because the name of a user's file may match another row
        (COMMUNICATION, r"^c10d::|^(gloo|nccl|mpi|ucc):|^nccl|^communication$"),
        ("attention", r"scaled_dot_product|flash|efficient_attention|fmha|attention"),
        ("convolution", r"(?i)conv(?!ert)|implicit|[fdw]grad(?!.*gemm)|winograd|im2col|wgrad"),
        (
            MATMUL,
            r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|linear_backward|dot|mv|addmv|_scaled_mm|_addmm_activation)$"
            r"|(?i:gemm|cutlass|nvjet|cublas|xmma|matmul|splitk)|_linear_pointwise|^(Addmm|Mm|Bmm|Baddbmm)Backward",
        ),
        ("optimizer", r"^optimizer$|^Optimizer\.|_fused_(adam|adamw|sgd)|_foreach_|multi_tensor_apply|FusedAdam"),
        (
            "memory",
            r"^Mem(cpy|set)|aten::((copy_|_to_copy|to|clone|fill_|zero_|cat|contiguous|stack)$|empty|resize_)"
            r"|direct_copy_kernel|CatArrayBatchedCopy|FillFunctor",
        ),
        ("compiled", r"CompiledFxGraph|CompiledFunction|^Torch-Compiled|^triton_"),
        (
            "normalization",
            r"(?i)(layer|batch|group|instance|rms)_?norm(?!.*(?-i:Backward)\d*$)|RowwiseMoments|GammaBeta|^cudnn::bn",
        ),
        ("softmax", r"(?i)softmax(?!(?-i:Backward)\d*$)"),
        ("pooling", r"(?i)(max|avg)_?pool(?!.*(?-i:Backward)\d*$)"),
        (
            "elementwise",
            r"^aten::(add|sub|rsub|mul|div|neg|exp|log|sqrt|rsqrt|pow|abs|clamp|maximum|minimum|where|lerp|addcmul|addcdiv"
            r"|threshold|relu|gelu|silu|sigmoid|tanh|\w*dropout|masked_fill)(_backward)?_?$|elementwise_kernel",
        ),
        ("launch", r"^cuda[A-Z]|^cu[A-Z]"),
        ("python", r"^<built-in|^<string>|^nn\.Module"),
        ("autograd", r"autograd::|Backward\d*$"),
    )
)
KINDS: Final = (*dict.fromkeys(kind for kind, _ in _TABLE), OTHER)
DECISIVE: Final = frozenset({MATMUL, "convolution", "attention", COMMUNICATION, "optimizer"})  # see `kind_on_device`

# The pattern by which Holistic Trace Analysis recognizes NCCL's kernels.
_COMMUNICATION_KERNEL: Final = re.compile(r"nccl.*Kernel")


@cache
def kind_of(name: str) -> str:
    """Return the kind of an operator, a range or a kernel by its name."""
    return next((kind for kind, pattern in _TABLE if pattern.search(name)), OTHER)


@cache
def is_communication_kernel(name: str) -> bool:
    """Return True if this is the name of a kernel that moves data between ranks."""
    return _COMMUNICATION_KERNEL.match(name) is not None
