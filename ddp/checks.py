"""What a wrapper asks before it communicates, so that a mistake is a sentence on every rank and not a hang.

    require_unwrapped        this rank alone     nobody else averages the same gradients
    require_member           this rank alone     there is a group, and this rank is in it
    require_dense            this rank alone     every parameter and buffer is memory that can be sent and written
    require_same_parameters  one all-gather      every rank has the same parameters and buffers: their kinds, not values
    require_used             one all-reduce      every trainable parameter got a gradient on some rank
    used_by_any              one all-reduce      which of them did

The last three are collectives of the wrapper's group. Ranks in messages are those of the whole job, not of the group.
"""

import hashlib
import json
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

LENGTH_BYTES: Final = 8
NAMED_AT_MOST: Final = 8  # parameters in a message
OVERLAPS: Final = 1  # what torch says of a tensor, two of whose elements are one


# Who averages the gradients of a parameter or module: by identity, and only while both live. It is not an attribute of
# theirs, for a module that holds a reference to its wrapper could not be pickled.
_WRAPPED_BY: Final[MutableMapping[nn.Module | Tensor, weakref.ref[nn.Module]]] = WeakIdKeyDictionary()


def mark_wrapped(module: nn.Module, wrapper: nn.Module) -> None:
    """Remember that `wrapper` averages the gradients of this module and its parameters, as long as it is in use."""
    marked: list[nn.Module | Tensor] = [*module.modules(), *module.parameters()]
    for each in marked:
        _WRAPPED_BY[each] = weakref.ref(wrapper)


def unmark_wrapped(module: nn.Module) -> None:
    """Forget who averaged the gradients of this module and its parameters."""
    marked: list[nn.Module | Tensor] = [*module.modules(), *module.parameters()]
    for each in marked:
        _WRAPPED_BY.pop(each, None)


def require_unwrapped(module: nn.Module) -> None:
    """Check that no other wrapper averages the gradients of this module, or of a part of it.

    Raises:
        ValueError: the module is a wrapper, contains one, or shares a part or parameter with one that is still in use.
    """
    for name, part in module.named_modules():
        what = f"its part {name!r}" if name else "the module"
        if isinstance(part, DistributedDataParallel) or hasattr(part, "finish_gradient_synchronization"):
            kind = type(part).__name__
            raise ValueError(
                f"{what} is a {kind} already: gradients would be averaged twice; wrap the plain module, its `.module`"
            )
        _require_free(part, what)
    for name, parameter in module.named_parameters():
        _require_free(parameter, f"parameter {name!r}")


def _require_free(each: nn.Module | Tensor, what: str) -> None:
    watched_by = _WRAPPED_BY.get(each)
    wrapper = None if watched_by is None else watched_by()
    if wrapper is not None:
        kind = type(wrapper).__name__
        raise ValueError(
            f"{what} belongs to a {kind} that is still in use: gradients would be averaged twice; "
            f"use that {kind}, or delete it first"
        )


def require_member(process_group: dist.ProcessGroup | None) -> None:
    """Check that there is a group to communicate in and that this rank is one of its ranks.

    Raises:
        ValueError: no process group is initialised, this rank is not in the one given, or it is not a process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("no process group is initialised: call torch.distributed.init_process_group() before wrapping")
    given: object = process_group  # what new_group() gives to a rank outside is a number
    if given == dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(given, dist.ProcessGroup) and dist.get_rank(given) < 0
    ):
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group given: "
            "wrap only on ranks that new_group() was told, or pass a group that this rank is in"
        )
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise ValueError(f"process_group must be a ProcessGroup or None, got {given!r}: name all other settings")


def require_dense(module: nn.Module) -> None:
    """Check that every parameter and buffer is dense memory of its own, which can be overwritten with another rank's.

    Raises:
        ValueError: one is not there yet, or sparse, nested or quantized, or its elements share memory.
    """
    for what, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, each in named:
            if why := _why_not_dense(each):
                raise ValueError(f"{what} {name!r} {why}")


def _why_not_dense(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "has no shape yet: forward the module once before wrapping it"
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        return f"is {kind}, wanted a dense tensor: make it one, or keep it as a plain attribute of the module"
    if tensor.is_meta:
        return "is on the meta device, without values: call to_empty() and initialize it before wrapping"
    if torch._debug_has_internal_overlap(tensor) == OVERLAPS:
        return "has elements that share memory, as expand() makes them: clone() it"
    return ""


def require_same_parameters(
    module: nn.Module,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Check that all ranks have the same parameters and buffers, in order: name, shape, dtype, layout, trainable.

    And the same settings of the wrapper, by name.

    A collective. Digests are compared first, 40 bytes a rank; only if they differ are the descriptions exchanged, each
    as long as the longest. No rank ever waits for another's tensor of another size. `device` is where the group's
    backend communicates: the rank's GPU with NCCL.

    Raises:
        ValueError: on every rank, naming the first difference, which ranks have what, and what is here.
    """
    told = [f"setting {name}={value}" for name, value in (settings or {}).items()]
    differing = difference_of([*told, *_description(module)], process_group, device)
    if differing:
        raise ValueError(
            f"the ranks' modules or wrappers differ: {differing}; "
            "build the same on every rank, and wrap it in the same way"
        )


def device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return where a group can send small things from."""
    return torch.device("cuda" if dist.get_backend(process_group) == dist.Backend.NCCL else "cpu")


def difference_of(lines: Sequence[str], process_group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Say how the ranks' lines differ, or nothing: a collective, of 40 bytes a rank where they agree."""
    mine = json.dumps(list(lines)).encode()
    digest = hashlib.sha256(mine).digest() + len(mine).to_bytes(LENGTH_BYTES, "big")
    if len(set(_gather_bytes(digest, process_group, device))) == 1:
        return ""
    descriptions = gather_json(list(lines), process_group, device)
    return first_difference(descriptions, here=dist.get_rank())


def gather_json(mine: Any, process_group: dist.ProcessGroup | None, device: torch.device) -> dict[int, Any]:
    """Return what every rank has, by rank of the whole job: a collective, of two messages."""
    text = json.dumps(mine).encode()
    lengths = _gather_bytes(len(text).to_bytes(LENGTH_BYTES, "big"), process_group, device)
    longest = max(int.from_bytes(each, "big") for each in lengths)
    texts = _gather_bytes(text.ljust(longest), process_group, device)
    ranks = dist.get_process_group_ranks(process_group)
    return dict(zip(ranks, (json.loads(each) for each in texts), strict=True))


def require_used(
    names: Sequence[str], used: Sequence[bool], process_group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Check that each trainable parameter got a gradient on at least one rank.

    A collective: `names` and `used` are those of all trainable parameters, in the same order on every rank.

    Raises:
        RuntimeError: on every rank, naming the parameters that got none anywhere, and what to set.
    """
    anywhere = used_by_any(used, process_group, device)
    without = [name for name, is_used in zip(names, anywhere, strict=True) if not is_used]
    if not without:
        return
    raise RuntimeError(
        f"{len(without)} of {len(names)} parameters got no gradient on any rank: {some_of(without)}; if the loss does "
        "not depend on them in every step, set find_unused_parameters=True; if it never does, call "
        "requires_grad_(False) on them before wrapping"
    )


def some_of(names: Sequence[str]) -> str:
    """List names, of many the first ones and how many more there are."""
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(names[:NAMED_AT_MOST])}{more}"


def used_by_any(used: Sequence[bool], process_group: dist.ProcessGroup | None, device: torch.device) -> list[bool]:
    """Return, of each flag, whether it is set on any rank: one small all-reduce, and the host waits for its answer."""
    flags = torch.tensor([int(each) for each in used], dtype=torch.int32, device=device)
    if len(flags):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=process_group)
    return [bool(flag) for flag in flags.tolist()]


def first_difference(descriptions: dict[int, list[str]], here: int) -> str:
    """Say at which entry the ranks' descriptions part, and who has what there; they must differ.

    Entries are compared in order, so one that is missing on a rank is told where the next stands in its place.
    """
    at = 0
    while len({description[at] for description in descriptions.values() if at < len(description)}) == 1 and all(
        at < len(description) for description in descriptions.values()
    ):
        at += 1
    who_has: dict[str, list[int]] = {}
    for rank, description in descriptions.items():
        found = description[at] if at < len(description) else "nothing more"
        who_has.setdefault(found, []).append(rank)
    sides = [
        f"{found} on {ranks_in_words(ranks)}{' (here)' if here in ranks else ''}" for found, ranks in who_has.items()
    ]
    return " but ".join(sides)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Name ranks with runs drawn together: `rank 3`, `ranks 0, 2-5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"


def _description(module: nn.Module) -> list[str]:
    """Describe each parameter, then each buffer: all that must agree before their values can be broadcast."""
    parameters = [
        f"parameter {name} {_kind(each)}{_layout(each)} {'trainable' if each.requires_grad else 'frozen'}"
        for name, each in module.named_parameters()
    ]
    return parameters + [f"buffer {name} {_kind(each)}" for name, each in module.named_buffers()]


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _layout(tensor: Tensor) -> str:
    """Return the strides where they are not the usual ones: gradients lie in the buckets as their parameters do."""
    return "" if tensor.is_contiguous() else f" strides {tensor.stride()}"


def _gather_bytes(mine: bytes, process_group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Return every rank's bytes, which must be as long as this rank's."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(received, sent, group=process_group)
    return [bytes(each.tolist()) for each in received]
