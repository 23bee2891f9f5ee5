"""The kinds of values in an optimizer's state: those with one entry per element, which are split, and all others.

exp_avg   a tensor of the parameter's shape                  each rank has the entries of its elements
step      a tensor of one element, a number, a text, None    each rank has the whole value
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from muster.zero.flat import FlatParameters
from muster.zero.layout import Slice
from muster.zero.segments import Segment, SegmentedOptimizer

MASTER: Final = "master"
NO_SETTINGS: Final = ("params", "param_names")
NO_PARAMETER: Final = "which is not a parameter and cannot be saved; keep such values in the parameter groups"
PLAIN: Final = (bool, int, float, str, type(None))
PROBE: Final = (5,)  # shape of the parameter of a trial step; an unlikely shape for a value that is not per element


class Kinds:
    """The states that an optimizer with the given settings of a group creates for each parameter.

    A trial step finds them.
    """

    def __init__(self, optimizer: SegmentedOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        self.settings = [
            {key: value for key, value in {**own, **loaded}.items() if key not in NO_SETTINGS}
            for own, loaded in zip(optimizer.param_groups, groups, strict=True)
        ]
        self._optimizer = optimizer
        self._known: dict[object, dict[str, Any]] = {}

    def of(self, place: int, parameter: Tensor) -> dict[str, Any]:
        """Return the states of a parameter of the shape `PROBE` in a group, by key."""
        dtype = torch.float32 if self._optimizer.masters and parameter.itemsize == 2 else parameter.dtype
        case = (place, dtype, parameter.device)
        if case not in self._known:
            probe = nn.Parameter(torch.zeros(PROBE, dtype=dtype, device=parameter.device))
            probe.grad = torch.zeros_like(probe)
            stepper = self._optimizer.fresh(deepcopy(self.settings[place]), [probe])
            stepper.step()
            self._known[case] = dict(stepper.state[probe])
        return self._known[case]


class SliceState(NamedTuple):
    """The states of a slice of a parameter, by key: those with one entry per element, and all others."""

    flat_parameter: FlatParameters
    at: Slice
    split: dict[str, Tensor]
    whole: dict[str, Any]


def slices_of(optimizer: SegmentedOptimizer) -> Iterator[SliceState]:
    """Yield the slices of this rank with their states.

    Raises:
        ValueError: If a state can neither be split nor kept whole, or belongs to no parameter.
    """
    if strange := [key for key in optimizer.inner.state if not isinstance(key, Tensor)]:
        raise ValueError(f"the optimizer's state has the key {strange[0]!r}, {NO_PARAMETER}")
    kinds = Kinds(optimizer, optimizer.param_groups)
    for place, segment in ((place, each) for place, group in enumerate(optimizer.segments) for each in group):
        flat_parameter, kept = segment.flat_parameter, optimizer.inner.state.get(segment.stepped, {})
        split = {key for key, value in kept.items() if _is_split(segment, key, value, kinds, place)}
        whole = {key: value for key, value in sorted(kept.items()) if key not in split}
        for key, value in whole.items():
            require_whole(flat_parameter.names[segment.slices[0].tensor], key, value)
        for at in segment.slices:
            own = slice(at.offset - segment.begin, at.offset - segment.begin + at.elements)
            parts = {key: kept[key][own] for key in sorted(split)}
            if flat_parameter.has_masters():
                parts[MASTER] = segment.stepped.detach()[own]
            yield SliceState(flat_parameter, at, parts, whole)


def _is_split(segment: Segment, key: str, value: Any, kinds: Kinds, place: int) -> bool:
    """Return whether a state of a segment has one entry per element."""
    if not isinstance(value, Tensor) or value.shape != segment.stepped.shape:
        return False
    # A segment of one element does not show to which kind a tensor of one element belongs.
    like = kinds.of(place, segment.flat_parameter.parameters[0]).get(key) if value.numel() == 1 else None
    return not isinstance(like, Tensor) or like.shape == PROBE


def require_whole(name: str, key: str, value: Any) -> None:
    """Check that a state is one value for a whole parameter.

    Raises:
        ValueError: If it is another tensor, or an object.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return
    if not isinstance(value, PLAIN):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"the state {key!r} of parameter {name} is {what}, which cannot be sharded; a state must be a tensor of "
            "the parameter's shape, a real tensor of one element, a number, a string or None"
        )
