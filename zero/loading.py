"""Load the state of a sharded optimizer. All ranks check the whole state before any rank changes its own."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor

from muster.zero.agreement import require_same, settings_in_words, together
from muster.zero.kinds import MASTER, NO_SETTINGS, PROBE, Kinds, require_whole
from muster.zero.layout import Slice
from muster.zero.segments import Segment, SegmentedOptimizer
from muster.zero.states import RANGE, SHARD, numbers_of, parameters_of

Entries = Mapping[str, Any]
ANOTHER: Final = "the state is from a different optimizer"
MODEL: Final = "the state is from a different model or different groups"
Cut = tuple[dict[str, Tensor], dict[str, Any]]  # the states of a slice: with one entry per element, and all others


@torch.no_grad()
def load(optimizer: SegmentedOptimizer, given: Mapping[str, Any]) -> None:
    """Load a shard or a whole state. A collective.

    Raises:
        ValueError: If the state does not fit the optimizer on this rank or on another rank.
    """
    plan: list[tuple[Segment, dict[str, Any], dict[str, Any]]] = []
    with together(optimizer.group):
        groups, state = _checked(optimizer, given)
        kinds = Kinds(optimizer, groups)
        _check_entries(optimizer, state, kinds)
        numbers = numbers_of(optimizer)
        for place, segments in enumerate(optimizer.segments):
            fresh = optimizer.fresh(kinds.settings[place], [segment.stepped for segment in segments])
            for segment in segments:
                parameters = [segment.flat_parameter.parameters[at.tensor] for at in segment.slices]
                kept = kinds.of(place, parameters[0])
                cut = [
                    _cut(segment, at, state.get(numbers[id(each)], {}), kept)
                    for at, each in zip(segment.slices, parameters, strict=True)
                ]
                plan.append((segment, _joined(segment, cut), dict(fresh.state.get(segment.stepped, {}))))
    require_same([settings_in_words(group) for group in groups], optimizer.group, "states to load")
    optimizer.share_settings()  # so that the inner optimizer's changes do not override loaded settings
    for each in plan:
        _fill(optimizer.inner, *each)
    for group, loaded in zip(optimizer.param_groups, groups, strict=True):
        group.update(deepcopy({key: value for key, value in loaded.items() if key not in NO_SETTINGS}))
    optimizer.share_settings()


def _checked(optimizer: SegmentedOptimizer, given: Mapping[str, Any]) -> tuple[list[Any], dict[int, Entries]]:
    """Check the groups and their parameters.

    Return the groups, and the entries by this optimizer's parameter numbers.
    """
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise ValueError(
            "expected an optimizer's state dict with 'state' and 'param_groups'; pass the result of state_dict()"
        )
    groups, state = list(given["param_groups"]), given["state"]
    sizes = [[len(group.get("params", ())) for group in side] for side in (groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{MODEL}: its groups have {sizes[0]} parameters, but this optimizer has {sizes[1]}")
    for place, group in enumerate(groups):
        if missing := sorted(optimizer.defaults.keys() - group.keys()):
            raise ValueError(
                f"{ANOTHER}: its group {place} has no {', '.join(missing)}; load a state of the same class"
            )
    own = (optimizer.rank, optimizer.ranks)
    if SHARD in given and tuple(given[SHARD]) != own:
        rank, ranks = given[SHARD]
        raise ValueError(
            f"the state is the shard of rank {rank} of {ranks}, but this is rank {own[0]} of {own[1]}; "
            "load the result of full_state_dict() or consolidate_state_dict()"
        )
    numbers = {key: number for number, key in enumerate(each for group in groups for each in group["params"])}
    if strange := [key for key in state if key not in numbers]:
        raise ValueError(f"{MODEL}: it has a parameter {strange[0]!r} that is in none of its groups")
    return groups, {numbers[key]: entries for key, entries in state.items()}


def _check_entries(optimizer: SegmentedOptimizer, state: Mapping[int, Entries], kinds: Kinds) -> None:
    """Check that each parameter has the states that the optimizer keeps, in the parameter's shape."""
    parameters = parameters_of(optimizer)
    places = [place for place, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    for number, entries in state.items():
        parameter, kept = parameters[number], kinds.of(places[number], parameters[number])
        found = {key for key, value in entries.items() if value is not None} - {RANGE, MASTER}
        needed = {key for key, value in kept.items() if value is not None}
        if found and not needed <= found <= kept.keys():
            raise ValueError(
                f"{ANOTHER}: for parameter {number} it has {', '.join(sorted(found))}, "
                f"but this optimizer keeps {', '.join(sorted(kept)) or 'nothing'}; load a state of the same class and "
                "settings"
            )
        shape = _shape(entries, parameter)
        for key in (*found, *({MASTER} & entries.keys())):
            value = entries[key]
            is_split = _is_split(key, value, kept, shape)
            if isinstance(value, Tensor) and (tuple(value.shape) != shape if is_split else value.numel() != 1):
                raise ValueError(
                    f"{MODEL}: {key} of parameter {number} has the shape {tuple(value.shape)}, "
                    f"but the parameter has {tuple(parameter.shape)}"
                )
            if not is_split:
                require_whole(str(number), key, value)


def _shape(entries: Entries, parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the states with one entry per element."""
    start, stop = entries.get(RANGE, (0, 0))
    return (stop - start,) if RANGE in entries else tuple(parameter.shape)


def _is_split(key: str, value: Any, kept: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    """Return whether a state has one entry per element. If the optimizer begins with None, its shape decides."""
    like = None if key == MASTER else kept[key]
    if like is None:
        return key == MASTER or (isinstance(value, Tensor) and tuple(value.shape) == shape)
    return isinstance(like, Tensor) and like.shape == PROBE


def _cut(segment: Segment, at: Slice, entries: Entries, kept: Mapping[str, Any]) -> Cut:
    """Return the states of a slice, tensors as views.

    Raises:
        ValueError: If the entries are for another range of the parameter.
    """
    if RANGE in entries and tuple(entries[RANGE]) != (at.start, at.stop):
        start, stop = entries[RANGE]
        raise ValueError(
            f"the state has another layout: it has elements {start} to {stop} of "
            f"{segment.flat_parameter.names[at.tensor]}, "
            f"but this rank has {at.start} to {at.stop}; "
            "load the result of full_state_dict() or consolidate_state_dict()"
        )
    split: dict[str, Tensor] = {}
    whole: dict[str, Any] = {}
    shape = _shape(entries, segment.flat_parameter.parameters[at.tensor])
    for key in (*kept, *((MASTER,) if segment.flat_parameter.has_masters() else ())):
        value, like = entries.get(key), kept.get(key)
        if value is None:
            if key in entries and like is None:
                whole[key] = None
            continue
        if _is_split(key, value, kept, shape):
            flat = torch.as_tensor(value).reshape(-1)
            part = flat if RANGE in entries else flat[at.start : at.stop]
            split[key] = part.to(like.dtype) if isinstance(like, Tensor) and key != MASTER else part
        elif isinstance(like, Tensor):
            whole[key] = torch.as_tensor(value).reshape(like.shape).to(like.device, like.dtype)
        else:
            whole[key] = value.item() if isinstance(value, Tensor) else value
    return split, whole


def _joined(segment: Segment, slices: Sequence[Cut]) -> dict[str, Any]:
    """Join the states of a segment's slices.

    Raises:
        ValueError: If the segment steps parameters together that were stepped separately when the state was saved.
    """
    split, whole = slices[0]
    for at, (each_split, each_whole) in zip(segment.slices, slices, strict=True):
        if each_split.keys() != split.keys() or each_whole != whole:
            names = [segment.flat_parameter.names[tensor] for tensor in (segment.slices[0].tensor, at.tensor)]
            raise ValueError(
                f"{names[0]} and {names[1]} now share one step count, but the checkpoint has one for each, "
                "because one of them had no gradient in some steps; build the wrapper with find_unused_parameters=True"
            )
    return {**whole, **{key: _side_by_side(segment, key, [each for each, _ in slices]) for key in split}}


def _side_by_side(segment: Segment, key: str, slices: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Copy the states of slices into one tensor with the segment's layout, and zeros in the gaps."""
    if len(slices) == 1:
        return slices[0][key]
    whole = slices[0][key].new_zeros(segment.end - segment.begin)
    for at, each in zip(segment.slices, slices, strict=True):
        whole[at.offset - segment.begin :][: at.elements] = each[key]
    return whole


def _fill(inner: torch.optim.Optimizer, segment: Segment, loaded: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Replace a segment's state, in place if it exists. Without a loaded state, reset it to a new optimizer's state."""
    if MASTER in loaded:
        segment.stepped.copy_(loaded[MASTER])
    wanted = {key: value for key, value in loaded.items() if key != MASTER} or fresh
    kept = inner.state[segment.stepped]
    for key in kept.keys() - wanted.keys():
        del kept[key]
    for key, value in wanted.items():
        old = kept.get(key)
        if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
            old.copy_(value)
        elif isinstance(value, Tensor) and value.shape == segment.stepped.shape:
            kept[key] = torch.empty_like(segment.stepped, dtype=value.dtype).copy_(value)
        else:
            kept[key] = value.clone() if isinstance(value, Tensor) else value
    if not kept:
        del inner.state[segment.stepped]
