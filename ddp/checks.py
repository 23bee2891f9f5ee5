"""Checks before communication, so that a mistake is an error message on every rank instead of a hang.

    require_unwrapped        this rank alone     no other wrapper averages the same gradients
    require_member           this rank alone     there is a group, and this rank is in it
    require_dense            this rank alone     every parameter and buffer is dense memory
    require_same_parameters  one all-gather      all ranks have the same kinds of parameters and buffers (not values)
    require_used             one all-reduce      every trainable parameter got a gradient on some rank
    used_by_any              one all-reduce      returns which parameters did

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
OVERLAPS: Final = 1  # torch's code for a tensor with elements that share memory


# The wrapper that averages the gradients of a module or parameter: by id, only while both live. Not an attribute,
# because a module with a reference to its wrapper could not be pickled.
_WRAPPED_BY: Final[MutableMapping[nn.Module | Tensor, weakref.ref[nn.Module]]] = WeakIdKeyDictionary()


def mark_wrapped(module: nn.Module, wrapper: nn.Module) -> None:
    """Record that `wrapper` averages the gradients of this module and its parameters, while it exists."""
    marked: list[nn.Module | Tensor] = [*module.modules(), *module.parameters()]
    for each in marked:
        _WRAPPED_BY[each] = weakref.ref(wrapper)


def unmark_wrapped(module: nn.Module) -> None:
    """Forget which wrapper averaged the gradients of this module and its parameters."""
    marked: list[nn.Module | Tensor] = [*module.modules(), *module.parameters()]
    for each in marked:
        _WRAPPED_BY.pop(each, None)


def require_unwrapped(module: nn.Module) -> None:
    """Check that no other wrapper averages the gradients of this module, or of a part of it.

    Raises:
        ValueError: If the module is a wrapper, contains one, or shares a part or parameter with one still in use.
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
    """Check that there is a process group and that this rank is in it.

    Raises:
        ValueError: If no process group is initialized, this rank is not in the given one, or it is not a process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("no process group is initialised: call torch.distributed.init_process_group() before wrapping")
    given: object = process_group  # new_group() returns a number on ranks outside the group
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
    """Check that every parameter and buffer is dense and can be overwritten with another rank's values.

    Raises:
        ValueError: If one is not initialized, is sparse, nested or quantized, or has elements that share memory.
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

    Also check the wrapper's settings, by name.

    A collective. Digests of 40 bytes per rank are compared first. Only if they differ are the descriptions exchanged,
    padded to the longest, so that no rank waits for a tensor of another size. `device` is where the group's backend
    communicates: the rank's GPU with NCCL.

    Raises:
        ValueError: On every rank; the message has the first difference, and which ranks have what.
    """
    told = [f"setting {name}={value}" for name, value in (settings or {}).items()]
    differing = difference_of([*told, *_description(module)], process_group, device)
    if differing:
        raise ValueError(
            f"the ranks' modules or wrappers differ: {differing}; "
            "build the same on every rank, and wrap it in the same way"
        )


def device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from which a group can send small tensors."""
    return torch.device("cuda" if dist.get_backend(process_group) == dist.Backend.NCCL else "cpu")


def difference_of(lines: Sequence[str], process_group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Describe how the ranks' lines differ; empty if they do not. A collective of 40 bytes per rank if they agree."""
    mine = json.dumps(list(lines)).encode()
    digest = hashlib.sha256(mine).digest() + len(mine).to_bytes(LENGTH_BYTES, "big")
    if len(set(_gather_bytes(digest, process_group, device))) == 1:
        return ""
    descriptions = gather_json(list(lines), process_group, device)
    return first_difference(descriptions, here=dist.get_rank())


def gather_json(mine: Any, process_group: dist.ProcessGroup | None, device: torch.device) -> dict[int, Any]:
    """Return the values of all ranks, by rank of the whole job. A collective of two messages."""
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

    A collective: `names` and `used` list all trainable parameters, in the same order on every rank.

    Raises:
        RuntimeError: On every rank; the message names the parameters without a gradient, and what to set.
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
    """List names; if there are many, the first ones and the number of the rest."""
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(names[:NAMED_AT_MOST])}{more}"


def used_by_any(used: Sequence[bool], process_group: dist.ProcessGroup | None, device: torch.device) -> list[bool]:
    """Return for each flag whether it is set on any rank. One small all-reduce, and the host waits for the result."""
    flags = torch.tensor([int(each) for each in used], dtype=torch.int32, device=device)
    if len(flags):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=process_group)
    return [bool(flag) for flag in flags.tolist()]


def first_difference(descriptions: dict[int, list[str]], here: int) -> str:
    """Describe the first entry at which the ranks' descriptions differ, and which ranks have what. They must differ.

    Entries are compared in order, so if an entry is missing on a rank, the following one is shown in its place.
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
    """Format ranks, with ranges: `rank 3`, `ranks 0, 2-5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"


def _description(module: nn.Module) -> list[str]:
    """Describe each parameter, then each buffer: everything that must agree before values are broadcast."""
    parameters = [
        f"parameter {name} {_kind(each)}{_layout(each)} {'trainable' if each.requires_grad else 'frozen'}"
        for name, each in module.named_parameters()
    ]
    return parameters + [f"buffer {name} {_kind(each)}" for name, each in module.named_buffers()]


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _layout(tensor: Tensor) -> str:
    """Return the strides if they are not the default, because gradients in buckets have the strides of parameters."""
    return "" if tensor.is_contiguous() else f" strides {tensor.stride()}"


def _gather_bytes(mine: bytes, process_group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Return every rank's bytes. All ranks must pass the same length."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(received, sent, group=process_group)
    return [bytes(each.tolist()) for each in received]
