"""Pipelining over the tokens of a sequence: a stage runs the slices of a micro-batch one after another (TeraPipe).

    forward    slice 0           slice 1              slice 2              one micro-batch on one stage
               keys k0    ──▶    reads k0, k1   ──▶   reads k0, k1, k2
    backward   slice 0    ◀──    slice 1        ◀──   slice 2              gradients of k0 add up until slice 0's turn

In a causal model, a token depends only on itself and earlier tokens. So the first stage can begin slice 1 while the
second stage runs slice 0 (Li et al. 2021, "TeraPipe: Token-level pipeline parallelism for training large-scale language
models").

Layers that combine tokens must support slices: attention calls `with_earlier_tokens` for its keys and values, and
position embeddings start at `first_token()`. Outside a sliced step `with_earlier_tokens` returns its arguments, and
`first_token` returns 0. A model whose layers combine tokens in any other way silently gets wrong gradients.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from muster.pipe.microbatch_passes import WholeGraphPass
from muster.pipe.schedules.actions import Schedule
from muster.pipe.schedules.tables import SLICES
from muster.pipe.stage import Stage

_TOKENS = -2  # dimension of tensors (..., tokens, width)
Offered = list[tuple[Tensor, ...]]  # detached tensors from each call of `with_earlier_tokens` in a forward


def first_token() -> int:
    """Return the position of the current slice's first token in the whole sequence."""
    now = _current
    return 0 if now is None else now.begin


def with_earlier_tokens(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Prepend the tensors (..., tokens, width) that earlier slices of the same sequences passed in the same call.

    A stage must make the same calls in the same order for every slice.

    Raises:
        RuntimeError: If an earlier slice made fewer calls.
    """
    now = _current
    return tensors if now is None else now.extend(tensors)


class SlicedPass(WholeGraphPass):
    """The forward and backward of one slice of a micro-batch through one stage."""

    def __init__(self, stage: Stage, microbatch: int, begin: int, slices: list[Offered]) -> None:
        super().__init__(stage, microbatch)
        self.begin = begin
        self._earlier, self._own = slices[:], Offered()
        slices.append(self._own)
        self._edges: list[tuple[GradientEdge, Tensor]] = []  # the gradients of tensors that later slices read

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage on a slice; its layers may read earlier slices."""
        global _current
        _current = self
        try:
            return super().forward(x, targets)
        finally:
            _current = None
            self._earlier = []  # the graph keeps the tensors that the backward needs

    def extend(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Prepend the tensors of earlier slices to this slice's own, which later slices will read in turn."""
        call = len(self._own)
        leaves = tuple(each.detach().requires_grad_(each.requires_grad) for each in tensors)
        self._own.append(leaves)
        both = zip(tensors, leaves, strict=True)
        self._edges += [(get_gradient_edge(each), leaf) for each, leaf in both if leaf.requires_grad]
        if any(len(each) <= call for each in self._earlier):
            raise RuntimeError(
                f"stage {self.stage.number}: a slice that begins at token {self.begin} calls with_earlier_tokens "
                f"{call + 1} times, but an earlier slice {call} times; every slice must run the same layers"
            )
        if not self._earlier:
            return tensors
        columns = zip(*(each[call] for each in self._earlier), strict=True)
        return tuple(torch.cat([*column, own], _TOKENS) for column, own in zip(columns, tensors, strict=True))

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Run the backward of this slice, after those of all later ones."""
        late = [(edge, leaf.grad) for edge, leaf in self._edges if leaf.grad is not None]
        self._edges = []
        return self.through([(self.edge, gradient), *late])


_current: SlicedPass | None = None  # not a ContextVar, which would break the graphs of torch.compile


class SlicedPasses:
    """A factory for the passes of a pipeline whose sequences are cut into slices of these lengths (`tokens`)."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._begins = [0, *accumulate(tokens)][:-1]
        self._slices: dict[
            int, list[Offered]
        ] = {}  # by stage: for each slice of the current micro-batch, the tensors that later slices read

    def make(self, stage: Stage, microbatch: int) -> SlicedPass:
        """Return the pass of slice `microbatch % slices`. Call it for the slices of a micro-batch in order."""
        index = microbatch % len(self._begins)
        if index == 0:
            self._slices[stage.number] = []
        slices = self._slices[stage.number]
        if index == len(self._begins) - 1:
            del self._slices[stage.number]  # so that only the passes keep the tensors alive
        return SlicedPass(stage, microbatch, self._begins[index], slices)


def equal_slices(length: int) -> tuple[int, ...]:
    """Return the lengths of the slices of a sequence by default: equal up to one token, longer slices first."""
    count = min(SLICES, length)
    each, longer = divmod(length, count)
    return tuple(each + (index < longer) for index in range(count))


def check_slices(schedule: Schedule, tokens: Sequence[int], *, others: bool) -> None:
    """Check the lengths of slices against a schedule.

    Raises:
        ValueError: If there are not as many lengths as slices, a length is less than 1, or one of `others` is set:
        options that cannot be combined with slices.
    """
    if len(tokens) != (schedule.slices if schedule.slices > 1 else len(tokens[:1])):
        raise ValueError(
            f"tokens: {len(tokens)} lengths for the {schedule.slices} slices of schedule {schedule.name}; "
            "give schedule(..., slices=) and tokens= the same number of slices"
        )
    if any(each < 1 for each in tokens):
        raise ValueError(f"tokens: every slice needs at least one token, got {', '.join(map(str, tokens))}")
    if tokens and others:
        raise ValueError("tokens: token slices cannot be combined with recompute, exact or cuda_graphs; omit these")
