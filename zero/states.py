"""Convert the state of a sharded optimizer to dictionaries: this rank's shard, or the whole state as in one process.

    shard    {"state": {number: {"range": (start, stop), key: elements [start, stop) of the flattened parameter, ...}},
              "param_groups": [...], "shard": (rank, ranks)}
    whole    {"state": {number: {key: tensor of the parameter's shape, ...}}, "param_groups": [...]}

Parameters are numbered over all groups, as in `torch.optim`. A whole state can be loaded on any number of ranks, and
into an optimizer that is not sharded.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import device_of, gather_json
from muster.zero.flat import FlatParameters, ParameterRange
from muster.zero.layout import Slice

if TYPE_CHECKING:
    from muster.zero.optimizer import Segment, ShardedOptimizer

MASTER: Final = "master"
RANGE: Final = "range"
SHARD: Final = "shard"
State = dict[str, Any]


def held(optimizer: "ShardedOptimizer") -> Iterator[tuple[FlatParameters, Slice, list[ParameterRange]]]:
    """Yield this rank's slices, each with its states."""
    for group in optimizer.segments:
        for segment in group:
            for at in segment.slices:
                yield segment.flat_parameter, at, list(_of_slice(segment, at, optimizer.inner))


def _of_slice(segment: "Segment", at: Slice, inner: torch.optim.Optimizer) -> Iterator[ParameterRange]:
    """Yield the states of one slice of a parameter."""
    flat_parameter = segment.flat_parameter
    name, shape = flat_parameter.names[at.tensor], tuple(flat_parameter.shapes[at.tensor])
    kept = {key: value for key, value in inner.state.get(segment.stepped, {}).items() if isinstance(value, Tensor)}
    if flat_parameter.has_masters():
        kept[MASTER] = segment.stepped.detach()
    for key, value in sorted(kept.items()):
        if value.dim() == 0:
            yield ParameterRange(name, key, (), 0, 1, value, answers=at.start == 0)
        else:
            start = at.offset - segment.begin
            yield ParameterRange(name, key, shape, at.start, at.stop, value[start : start + at.elements])


def slices_of(optimizer: "ShardedOptimizer") -> Iterator[tuple[FlatParameters, Slice, dict[str, Tensor]]]:
    """Yield the slices of this rank, each with its states by key."""
    for flat_parameter, at, kept in held(optimizer):
        yield flat_parameter, at, {str(each.key): each.tensor for each in kept}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the parameters of all groups. A parameter's number is its position in this list."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the numbers of the parameters of all groups, by id."""
    return {id(each): number for number, each in enumerate(parameters_of(optimizer))}


def _groups(optimizer: "ShardedOptimizer") -> list[State]:
    optimizer.share_settings()
    numbers = numbers_of(optimizer)
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [numbers[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def _numbered(optimizer: "ShardedOptimizer") -> list[tuple[int, Slice, dict[str, Tensor], bool]]:
    """List this rank's slices that have a state: (parameter number, slice, states, whether the states must be saved).

    A master that equals its parameter need not be saved if it is the only state, as before the first step. If no part
    of a parameter need be saved, its entry is omitted, because torch's optimizers expect complete entries.
    """
    numbers = numbers_of(optimizer)
    found = [
        (
            numbers[id(flat_parameter.parameters[at.tensor])],
            at,
            kept,
            kept.keys() != {MASTER}
            or not torch.equal(kept[MASTER], flat_parameter.of(flat_parameter.shard, at).float()),
        )
        for flat_parameter, at, kept in slices_of(optimizer)
        if kept
    ]
    return sorted(found, key=lambda each: each[0])


def local(optimizer: "ShardedOptimizer") -> State:
    """Return this rank's shard. As in `torch.optim`, tensors are not copied."""
    state = {number: {RANGE: (at.start, at.stop), **kept} for number, at, kept, tells in _numbered(optimizer) if tells}
    return {"state": state, "param_groups": _groups(optimizer), SHARD: (optimizer.rank, optimizer.ranks)}


def full(optimizer: "ShardedOptimizer", recipient: int | None) -> State | None:
    """Return the state of all parameters on one rank of the group, or on all ranks. A collective.

    The ranks first exchange lists of their states. Then each rank in turn sends one message per dtype.
    """
    mine = _numbered(optimizer)
    table = [
        [number, at.start, at.stop, {key: _dtype_and_value(value) for key, value in kept.items()}, tells]
        for number, at, kept, tells in mine
    ]
    given = list(gather_json(table, optimizer.group, device_of(optimizer.group)).values())
    telling = {number for lines in given for number, *_, tells in lines if tells}
    told = [[line for *line, _ in lines if line[0] in telling] for lines in given]
    own = {number: kept for number, _, kept, _ in mine}
    parameters = parameters_of(optimizer)
    state: dict[int, dict[str, Tensor]] = {}
    for owner, lines in enumerate(told):
        for number, _, _, kept in lines:
            ones = {key: torch.tensor(one[0], dtype=_dtype(name)) for key, (name, *one) in kept.items() if one}
            state.setdefault(number, {}).update(ones)
        for (name, device), ranges in _messages(lines, parameters).items():
            elements = [stop - start for _, start, stop, _ in ranges]
            if owner == optimizer.rank:
                message = torch.cat([own[number][key] for number, _, _, key in ranges])
            else:
                message = torch.empty(sum(elements), dtype=_dtype(name), device=device)
            if not _hand_over(optimizer, message, owner, recipient):
                continue
            for (number, start, stop, key), part in zip(ranges, torch.split(message, elements), strict=True):
                if key not in state[number]:
                    state[number][key] = torch.empty(parameters[number].shape, dtype=part.dtype, device=device)
                state[number][key].view(-1)[start:stop] = part
    if recipient not in (None, optimizer.rank):
        return None
    return {"state": dict(sorted(state.items())), "param_groups": _groups(optimizer)}


def _messages(
    lines: Sequence[Any], parameters: Sequence[Tensor]
) -> dict[tuple[str, torch.device], list[tuple[int, int, int, str]]]:
    """Group a rank's states by dtype and device, one group per message. Entries are (number, start, stop, key)."""
    sorted_: dict[tuple[str, torch.device], list[tuple[int, int, int, str]]] = {}
    for number, start, stop, kept in lines:
        for key, (name, *one) in kept.items():
            if not one:
                sorted_.setdefault((name, parameters[number].device), []).append((number, start, stop, key))
    return sorted_


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _dtype_and_value(value: Tensor) -> list[Any]:
    """Return a state's dtype, and its value if it is one number per parameter."""
    dtype = str(value.dtype).removeprefix("torch.")
    return [dtype, value.item()] if value.dim() == 0 else [dtype]


def _hand_over(optimizer: "ShardedOptimizer", message: Tensor, owner: int, recipient: int | None) -> bool:
    """Send a message from its owner to the recipient, or to all ranks. Return whether this rank is a recipient."""
    group, rank = optimizer.group, optimizer.rank
    if recipient is None:
        dist.broadcast(message, group=group, group_src=owner)
    elif owner != recipient and rank == owner:
        dist.send(message, group=group, group_dst=recipient)
    elif owner != recipient and rank == recipient:
        dist.recv(message, group=group, group_src=owner)
    return recipient in (None, rank)
