"""Segments of a rank's shards, and the inner optimizer that steps them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.ddp.means import Group
from muster.zero.apart import PARAMS
from muster.zero.flat import FlatParameters
from muster.zero.layout import Slice

NAMES: Final = "param_names"
_UNSET: Final = object()


class Segment:
    """Adjacent slices in one flat tensor's shard, which the inner optimizer steps as one tensor."""

    def __init__(self, flat_parameter: FlatParameters, slices: Sequence[Slice]) -> None:
        self.flat_parameter = flat_parameter
        self.slices = slices
        self.begin = slices[0].offset
        self.end = slices[-1].offset + slices[-1].elements
        self.stepped = nn.Parameter(flat_parameter.stepped[self.begin : self.end], requires_grad=True)


class SegmentedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `inner` optimizer steps this rank's segments, with one list of segments per group."""

    group: Group
    rank: int
    ranks: int
    masters: bool  # 16-bit parameters are stepped in a float32 copy
    segments: list[list[Segment]]
    inner: torch.optim.Optimizer
    _kind: type[torch.optim.Optimizer]
    _options: Mapping[str, Any]
    _agreed: list[dict[str, Any]]  # settings of each group after the last exchange

    def fresh(self, settings: Mapping[str, Any], tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Build an optimizer like the inner one, with one group."""
        return self._kind([{**settings, PARAMS: tensors}], **self._options)

    def share_settings(self) -> None:
        """Copy changed settings between the groups of the outer and inner optimizer.

        If a setting has changed in both groups, the outer value is kept. The caller sets learning rates in the outer
        groups. The inner optimizer may store counters and estimates in its own groups, and change them in its step or
        other methods.
        """
        for outer, inner, agreed in zip(self.param_groups, self.inner.param_groups, self._agreed, strict=True):
            own = settings_of(outer)
            for key, value in settings_of(inner).items():
                if value is not agreed.get(key, _UNSET) and own.get(key, _UNSET) is agreed.get(key, _UNSET):
                    outer[key] = value
            agreed.clear()
            agreed.update(settings_of(outer))
            inner.update(agreed)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group."""
    return {key: value for key, value in group.items() if key not in (PARAMS, NAMES)}
