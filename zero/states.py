"""The state of a sharded optimizer as dictionaries: this rank's shard, and the whole as one process would have it.

    shard    {"state": {number: {"range": (start, stop), key: elements [start, stop) of the flattened parameter, ...}},
              "param_groups": [...]}
    whole    {"state": {number: {key: tensor of the parameter's shape, ...}}, "param_groups": [...]}

Numbers count the parameters of all groups, as `torch.optim` does. A whole one loads at any number of ranks, and into
the optimizer that is not sharded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.checks import gather_json
from zero.flat import FlatParameters, Held
from zero.layout import Slice

if TYPE_CHECKING:
    from zero.optimizer import Segment, ShardedOptimizer

MASTER: Final = "master"
RANGE: Final = "range"


def held(segments: Sequence[Sequence["Segment"]], inner: torch.optim.Optimizer) -> list[Held]:
    """List a rank's state by parameter and key."""
    return [each for segment in _flatten(segments) for at in segment.slices for each in _of_slice(segment, at, inner)]


def _flatten(segments: Sequence[Sequence["Segment"]]) -> Iterator["Segment"]:
    return (segment for group in segments for segment in group)


def _of_slice(segment: "Segment", at: Slice, inner: torch.optim.Optimizer) -> Iterator[Held]:
    """Yield what is kept of one slice of a parameter."""
    home = segment.home
    name, shape = home.names[at.tensor], tuple(home.shapes[at.tensor])
    for key, value in sorted(_entries(segment, inner).items()):
        if value.dim() == 0:
            yield Held(name, key, (), 0, 1, value, answers=at.start == 0)
        else:
            start = at.offset - segment.begin
            yield Held(name, key, shape, at.start, at.stop, value[start : start + at.elements])


def _entries(segment: "Segment", inner: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a segment's state, and its master."""
    kept = {key: value for key, value in inner.state.get(segment.stepped, {}).items() if isinstance(value, Tensor)}
    return {**kept, MASTER: segment.stepped.detach()} if segment.home.has_masters() else kept


def _numbers(optimizer: "ShardedOptimizer") -> dict[int, int]:
    """Number the parameters of all groups."""
    return {id(each): n for n, each in enumerate(each for g in optimizer.param_groups for each in g["params"])}


def _groups(optimizer: "ShardedOptimizer") -> list[dict[str, Any]]:
    numbers = _numbers(optimizer)
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [numbers[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def local(optimizer: "ShardedOptimizer") -> dict[str, Any]:
    """Return this rank's shard: copies of nothing, as `torch.optim` does."""
    numbers = _numbers(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for home, at, entries in _slices(optimizer):
        state[numbers[id(home.parameters[at.tensor])]] = {RANGE: (at.start, at.stop), **entries}
    return {"state": state, "param_groups": _groups(optimizer)}


def _slices(optimizer: "ShardedOptimizer") -> Iterator[tuple[FlatParameters, Slice, dict[str, Tensor]]]:
    for segment in _flatten(optimizer.segments):
        for at in segment.slices:
            yield segment.home, at, {str(each.key): each.tensor for each in _of_slice(segment, at, optimizer.inner)}


def full(optimizer: "ShardedOptimizer", recipient: int | None) -> dict[str, Any] | None:
    """Return the state of all parameters on a rank of the group, or on all of them: a collective.

    What each rank has is told first; then every range goes to whoever wants it, in one order on all ranks.
    """
    numbers = _numbers(optimizer)
    mine = {(numbers[id(home.parameters[at.tensor])], at.start): entries for home, at, entries in _slices(optimizer)}
    device = _device(optimizer)
    table = [
        [number, start, key, list(value.shape), str(value.dtype).removeprefix("torch."), _told(value)]
        for (number, start), entries in sorted(mine.items())
        for key, value in entries.items()
    ]
    told = list(gather_json(table, optimizer.group, device).values())
    wants = recipient is None or recipient == optimizer.rank
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for owner, lines in enumerate(told):
        for number, start, key, shape, dtype, scalar in lines:
            kind = getattr(torch, dtype)
            if not shape:
                if wants:
                    state.setdefault(number, {})[key] = torch.tensor(scalar, dtype=kind)
                continue
            have = mine[number, start][key] if owner == optimizer.rank else None
            part = _hand_over(optimizer, have, owner, recipient, shape[0], kind, parameters[number].device)
            if part is not None:
                whole = state.setdefault(number, {}).setdefault(
                    key, torch.zeros(parameters[number].numel(), dtype=kind, device=part.device)
                )
                whole[start : start + shape[0]] = part
    if not wants:
        return None
    shaped = {
        number: {
            key: value if value.dim() == 0 else value.view(parameters[number].shape) for key, value in entries.items()
        }
        for number, entries in sorted(state.items())
    }
    return {"state": shaped, "param_groups": _groups(optimizer)}


def _told(value: Tensor) -> float | int | None:
    return value.item() if value.dim() == 0 else None


def _hand_over(
    optimizer: "ShardedOptimizer",
    have: Tensor | None,
    owner: int,
    recipient: int | None,
    elements: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Bring a range from its owner to the recipient, or to all; return it where it is wanted."""
    group = optimizer.group
    if recipient is None:
        part = torch.empty(elements, dtype=dtype, device=device) if have is None else have.contiguous()
        if optimizer.ranks > 1:
            dist.broadcast(part, group=group, group_src=owner)
        return part
    if owner == recipient:
        return have
    if have is not None:
        dist.send(have.contiguous(), group=group, group_dst=recipient)
    elif optimizer.rank == recipient:
        part = torch.empty(elements, dtype=dtype, device=device)
        dist.recv(part, group=group, group_src=owner)
        return part
    return None


def _device(optimizer: "ShardedOptimizer") -> torch.device:
    return next((each.device for group in optimizer.param_groups for each in group["params"]), torch.device("cpu"))


@torch.no_grad()
def load(optimizer: "ShardedOptimizer", given: Mapping[str, Any]) -> None:
    """Load a shard or a whole state; all of it is checked before any of it is changed.

    Raises:
        ValueError: it does not fit.
    """
    groups, state = _checked_groups(optimizer, given)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, entries in state.items():
        _check_entries(number, entries, parameters)
    plan: list[tuple[nn.Parameter, dict[str, Tensor]]] = []
    numbers = _numbers(optimizer)
    for segment in _flatten(optimizer.segments):
        found = [
            _found(segment, at, state.get(numbers[id(segment.home.parameters[at.tensor])], {})) for at in segment.slices
        ]
        if len({frozenset(each) for each in found}) > 1:
            raise ValueError(
                f"state: {segment.home.names[segment.slices[0].tensor]} and its neighbours have other keys than each "
                f"other, {sorted(found[0])} and {sorted(found[-1])}; it is of another optimizer"
            )
        plan.append((segment.stepped, _joined(found)))
    for stepped, entries in plan:
        _fill(optimizer, stepped, entries)
    for group, loaded in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in loaded.items() if key not in ("params", "param_names")})


def _checked_groups(optimizer: "ShardedOptimizer", given: Mapping[str, Any]) -> tuple[list[Any], dict[int, Any]]:
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise ValueError("a state dict of an optimizer has state and param_groups; pass what state_dict() returned")
    groups, own = given["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in side] for side in (groups, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state is of another model or other groups: its groups have {sizes[0]} parameters, "
            f"this optimizer's {sizes[1]}"
        )
    return groups, dict(given["state"])


def _check_entries(number: int, entries: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """Check one parameter's entry by its own range and shape."""
    if not 0 <= number < len(parameters):
        raise ValueError(f"the state is of another model: it has a parameter {number}, this one has {len(parameters)}")
    parameter = parameters[number]
    for key, value in entries.items():
        if key == RANGE or not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if RANGE in entries:
            start, stop = entries[RANGE]
            fits = value.shape == (stop - start,) and 0 <= start <= stop <= parameter.numel()
        else:
            fits = value.shape == parameter.shape
        if not fits:
            raise ValueError(
                f"the state is of another model: {key} of parameter {number} has shape {tuple(value.shape)}, "
                f"the parameter {tuple(parameter.shape)}"
            )


def _found(segment: "Segment", at: Slice, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a state has for a slice, cut to it.

    Raises:
        ValueError: it has another range of the parameter.
    """
    name = segment.home.names[at.tensor]
    if RANGE in entries and tuple(entries[RANGE]) != (at.start, at.stop):
        raise ValueError(
            f"the state is another rank's, or of another number of ranks: it has elements {entries[RANGE][0]} to "
            f"{entries[RANGE][1]} of {name}, this rank {at.start} to {at.stop}; "
            "load what full_state_dict() or consolidate_state_dict() returned"
        )
    cut: dict[str, Tensor] = {}
    for key, value in entries.items():
        if key != RANGE and isinstance(value, Tensor):
            whole = value.dim() > 0 and RANGE not in entries
            cut[key] = value.reshape(-1)[at.start : at.stop] if whole else value
    return cut


def _joined(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Lay the slices of a segment side by side; of numbers that are one for all, take the first."""
    return {
        key: value if value.dim() == 0 else torch.cat([each[key] for each in found]) for key, value in found[0].items()
    }


def _fill(optimizer: "ShardedOptimizer", stepped: nn.Parameter, entries: dict[str, Tensor]) -> None:
    """Replace a segment's state; what is there is filled in place."""
    if MASTER in entries:
        stepped.copy_(entries[MASTER])
    kept = optimizer.inner.state[stepped]
    for key, value in entries.items():
        if key == MASTER:
            continue
        if isinstance(kept.get(key), Tensor):
            kept[key].copy_(value)
        else:
            group = next(g for g in optimizer.inner.param_groups if any(each is stepped for each in g["params"]))
            on_host = value.dim() == 0 and not (group.get("fused") or group.get("capturable"))
            kept[key] = value.clone() if on_host else value.to(stepped.device, copy=True)
