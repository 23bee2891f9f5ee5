"""Convert the state of a sharded optimizer to dictionaries: this rank's shard, or the whole state as in one process.

    shard    {"state": {number: {"range": (start, stop), key: elements [start, stop) of the flattened parameter, ...}},
              "param_groups": [...], "shard": (rank, ranks)}
    whole    {"state": {number: {key: tensor of the parameter's shape, ...}}, "param_groups": [...]}

Parameters are numbered over all groups, as in `torch.optim`. A whole state can be loaded on any number of ranks, and
into an optimizer that is not sharded.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import device_of, gather_json
from muster.zero.agreement import together
from muster.zero.flat import ParameterRange
from muster.zero.kinds import MASTER, slices_of
from muster.zero.layout import Slice
from muster.zero.segments import SegmentedOptimizer

RANGE: Final = "range"
SHARD: Final = "shard"
State = dict[str, Any]


def held(optimizer: SegmentedOptimizer) -> Iterator[ParameterRange]:
    """Yield the tensors of this rank's state."""
    for flat_parameter, at, split, whole in slices_of(optimizer):
        name, shape = flat_parameter.names[at.tensor], tuple(flat_parameter.shapes[at.tensor])
        for key, value in whole.items():
            if isinstance(value, Tensor):
                yield ParameterRange(name, key, tuple(value.shape), 0, 1, value, answers=at.start == 0)
        for key, value in split.items():
            yield ParameterRange(name, key, shape, at.start, at.stop, value)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the parameters of all groups. A parameter's number is its position in this list."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the numbers of the parameters of all groups, by id."""
    return {id(each): number for number, each in enumerate(parameters_of(optimizer))}


def _groups(optimizer: SegmentedOptimizer) -> list[State]:
    optimizer.share_settings()
    numbers = numbers_of(optimizer)
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [numbers[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def _entries(optimizer: SegmentedOptimizer) -> list[tuple[int, Slice, dict[str, Tensor], dict[str, Any], bool]]:
    """List this rank's slices that have a state: (parameter number, slice, states with one entry per element, other
    states, whether the states must be saved).

    A master that equals its parameter need not be saved if it is the only state, as before the first step. If no part
    of a parameter need be saved, its entry is omitted, because torch's optimizers expect complete entries.
    """
    numbers = numbers_of(optimizer)
    found = []
    for flat_parameter, at, split, whole in slices_of(optimizer):
        only_master = not whole and split.keys() == {MASTER}
        is_new = only_master and torch.equal(split[MASTER], flat_parameter.of(flat_parameter.shard, at).float())
        if split or whole:
            found.append((numbers[id(flat_parameter.parameters[at.tensor])], at, split, whole, not is_new))
    return sorted(found, key=lambda each: each[0])


def local(optimizer: SegmentedOptimizer) -> State:
    """Return this rank's shard. As in `torch.optim`, tensors are not copied."""
    state = {
        number: {RANGE: (at.start, at.stop), **whole, **split}
        for number, at, split, whole, tells in _entries(optimizer)
        if tells
    }
    return {"state": state, "param_groups": _groups(optimizer), SHARD: (optimizer.rank, optimizer.ranks)}


def full(optimizer: SegmentedOptimizer, recipient: int | None) -> State | None:
    """Return the state of all parameters on one rank of the group, or on all ranks. A collective.

    The ranks first exchange lists of their states. Then each rank in turn sends one message per dtype.
    """
    with together(optimizer.group):
        mine = _entries(optimizer)
    table = [
        [number, at.start, at.stop, _dtypes(split), {key: _as_json(value) for key, value in whole.items()}, tells]
        for number, at, split, whole, tells in mine
    ]
    given = list(gather_json(table, optimizer.group, device_of(optimizer.group)).values())
    telling = {number for lines in given for number, *_, tells in lines if tells}
    told = [[line for *line, _ in lines if line[0] in telling] for lines in given]
    own = {number: split for number, _, split, _, _ in mine}
    parameters = parameters_of(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for owner, lines in enumerate(told):
        for number, *_, whole in lines:
            state.setdefault(number, {}).update({key: _from_json(value) for key, value in whole.items()})
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
    for number, start, stop, split, _ in lines:
        for key, name in split.items():
            sorted_.setdefault((name, parameters[number].device), []).append((number, start, stop, key))
    return sorted_


def _dtypes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {key: str(each.dtype).removeprefix("torch.") for key, each in tensors.items()}


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _as_json(value: Any) -> Any:
    """Return a value, or for a tensor its dtype and its value."""
    return {**_dtypes({"dtype": value}), "value": value.tolist()} if isinstance(value, Tensor) else value


def _from_json(said: Any) -> Any:
    return torch.tensor(said["value"], dtype=_dtype(said["dtype"])) if isinstance(said, dict) else said


def _hand_over(optimizer: SegmentedOptimizer, message: Tensor, owner: int, recipient: int | None) -> bool:
    """Send a message from its owner to the recipient, or to all ranks. Return whether this rank is a recipient."""
    group, rank = optimizer.group, optimizer.rank
    if recipient is None:
        dist.broadcast(message, group=group, group_src=owner)
    elif owner != recipient and rank == owner:
        dist.send(message, group=group, group_dst=recipient)
    elif owner != recipient and rank == recipient:
        dist.recv(message, group=group, group_src=owner)
    return recipient in (None, rank)
