"""Checks before communication, so that a mistake raises an error on every rank instead of causing a hang.

    require_unwrapped        this rank alone     no other wrapper averages the same gradients
    require_member           this rank alone     there is a group, and this rank is in it
    require_dense            this rank alone     every parameter and buffer is dense memory
    require_same_parameters  one all-gather      names, shapes, dtypes (not values) are the same on all ranks
    require_used             one all-reduce      every trainable parameter got a gradient on some rank
    used_by_any              one all-reduce      returns which parameters got a gradient on some rank
    warn_of_skipped          this rank alone     warns of parameters that got no gradient on any rank in a later step

The checks that communicate are collectives of the wrapper's group. Messages give a rank's number in the whole job, not
in the group.
"""

import hashlib
import json
import warnings
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

LENGTH_BYTES: Final = 8
DIGEST_BYTES: Final = 32
ABORTED: Final = "a collective ended without the values of all ranks: a rank has aborted it"
NAMED_AT_MOST: Final = 8  # maximum number of parameters that one message lists
OVERLAPS: Final = 1  # returned by torch if elements of a tensor share memory


# Maps modules and parameters to the wrapper that averages their gradients, without keeping either alive. This is not an
# attribute, because a module that refers to its wrapper could not be pickled.
_WRAPPED_BY: Final[MutableMapping[nn.Module | Tensor, weakref.ref[nn.Module]]] = WeakIdKeyDictionary()


def mark_wrapped(module: nn.Module, wrapper: nn.Module) -> None:
    """Record that `wrapper` averages the gradients of this module and its parameters, until the wrapper is deleted."""
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
        ValueError: If the module is or contains a wrapper, or shares a part or parameter with a wrapper still in use.
    """
    for name, part in module.named_modules():
        what = f"its part {name!r}" if name else "the module"
        if isinstance(part, DistributedDataParallel) or hasattr(part, "finish_gradient_synchronization"):
            kind = type(part).__name__
            raise ValueError(
                f"{what} is already a {kind}: gradients would be averaged twice; wrap the plain module (its `.module`)"
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
        ValueError: If no process group is initialized, or `process_group` is not a process group or does not contain
        this rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("no process group is initialized: call torch.distributed.init_process_group() before wrapping")
    given: object = process_group  # on ranks outside the group, new_group() returns a number
    if given == dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(given, dist.ProcessGroup) and dist.get_rank(given) < 0
    ):
        raise ValueError(
            f"rank {dist.get_rank()} is not in the given process group: "
            "wrap only on the ranks passed to new_group(), or pass a group that contains this rank"
        )
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise ValueError(f"process_group must be a ProcessGroup or None, got {given!r}: pass other settings by name")


def require_dense(module: nn.Module) -> None:
    """Check that every parameter and buffer is dense and can be overwritten with another rank's values.

    Raises:
        ValueError: If a tensor is not initialized, is sparse, nested or quantized, or has elements that share memory.
    """
    require_dense_tensors("parameter", module.named_parameters())
    require_dense_tensors("buffer", module.named_buffers())


def require_dense_tensors(what: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Check tensors as `require_dense` does.

    Raises:
        ValueError: As in `require_dense`.
    """
    for name, each in named:
        if why := _why_not_dense(each):
            raise ValueError(f"{what} {name!r} {why}")


def _why_not_dense(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "has no shape yet: call the module once before wrapping it"
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        return f"is {kind}, expected a dense tensor: convert it, or make it a plain attribute of the module"
    if tensor.is_meta:
        return "is on the meta device, without values: call to_empty() and initialize it before wrapping"
    if torch._debug_has_internal_overlap(tensor) == OVERLAPS:
        return "has elements that share memory, as after expand(): clone() it"
    return ""


def require_same_parameters(
    module: nn.Module,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Check that all ranks have the same parameters and buffers in the same order, and the same settings.

    Names, shapes, dtypes, strides and `requires_grad` must agree. This is a collective. Ranks first compare digests of
    40 bytes, and exchange descriptions only if the digests differ. `device` is the device from which the group's
    backend sends. With NCCL, it is the rank's GPU.

    Raises:
        ValueError: On every rank, if modules or settings differ. The message shows the first difference.
    """
    setting_lines = [f"setting {name}={value}" for name, value in (settings or {}).items()]
    differing = difference_of([*setting_lines, *_description(module)], process_group, device)
    if differing:
        raise ValueError(
            f"the ranks' modules or wrappers differ: {differing}; "
            "build the same module on every rank, and wrap it in the same way"
        )


def device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from which a group can send small tensors."""
    return torch.device("cuda" if dist.get_backend(process_group) == dist.Backend.NCCL else "cpu")


def difference_of(lines: Sequence[str], process_group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Describe how the ranks' lines differ, or return "".

    This is a collective. If the ranks agree, it sends 40 bytes per rank.
    """
    mine = json.dumps(list(lines)).encode()
    digest = hashlib.sha256(mine).digest() + len(mine).to_bytes(LENGTH_BYTES, "big")
    if len(set(_gather_bytes(digest, process_group, device))) == 1:
        return ""
    descriptions = gather_json(list(lines), process_group, device)
    return first_difference(descriptions, here=dist.get_rank())


def gather_json(mine: Any, process_group: dist.ProcessGroup | None, device: torch.device) -> dict[int, Any]:
    """Gather a JSON value from every rank with two collectives; return the values by rank of the whole job.

    Values are padded to the same length, because all ranks of an all-gather must send the same number of bytes.

    Raises:
        ConnectionError: If a rank has aborted a collective, because NCCL then returns any bytes.
    """
    text = json.dumps(mine).encode()
    heads = [length_of(each) for each in _gather_bytes(head_of(text), process_group, device)]
    texts = _gather_bytes(text.ljust(max(length for length, _ in heads)), process_group, device)
    values = (json.loads(whole_text(each, *head)) for each, head in zip(texts, heads, strict=True))
    return dict(zip(dist.get_process_group_ranks(process_group), values, strict=True))


def head_of(text: bytes) -> bytes:
    """Return what announces a text to another rank: its length, its digest, and the digest of both."""
    head = len(text).to_bytes(LENGTH_BYTES, "big") + hashlib.sha256(text).digest()
    return head + hashlib.sha256(head).digest()


def length_of(head: bytes) -> tuple[int, bytes]:
    """Return the length and the digest of a text that `head_of` has announced.

    Raises:
        ConnectionError: If the bytes are other ones, because a rank has aborted the collective.
    """
    told, digest = head[:-DIGEST_BYTES], head[-DIGEST_BYTES:]
    if hashlib.sha256(told).digest() != digest:
        raise ConnectionError(ABORTED)
    return int.from_bytes(told[:LENGTH_BYTES], "big"), told[LENGTH_BYTES:]


def whole_text(padded: bytes, length: int, digest: bytes) -> bytes:
    """Return an announced text.

    Raises:
        ConnectionError: If the bytes are other ones, because a rank has aborted the collective.
    """
    text = padded[:length]
    if hashlib.sha256(text).digest() != digest:
        raise ConnectionError(ABORTED)
    return text


def require_used(
    names: Sequence[str], used: Sequence[bool], process_group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Check that each trainable parameter got a gradient on at least one rank.

    This is a collective. `names` and `used` list all trainable parameters, in the same order on every rank.

    Raises:
        RuntimeError: On every rank, if a parameter got no gradient. The message names these parameters, and says what
        to do.
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


def warn_of_skipped(means: Sequence[tuple[str, Tensor]]) -> bool:
    """Warn of parameters for which no rank has computed a gradient in this step. Return whether there was a warning.

    `means` are the mean gradients of parameters for which this rank has computed none. A mean of zeros shows that no
    other rank has computed one either. On CUDA, the host waits for the means, unless a graph is being recorded.
    """
    means = [(name, mean) for name, mean in means if mean.numel()]
    if not means or (means[0][1].is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    used = torch.stack([mean.any() for _, mean in means]).tolist()
    if names := [name for (name, _), is_used in zip(means, used, strict=True) if not is_used]:
        warnings.warn(
            f"{some_of(names)}: got no gradient in this step on any rank, so zeros take the place of the gradient, and "
            "the optimizer may still change the parameter (weight decay, momentum). If the loss does not depend on it "
            "in every step, set find_unused_parameters=True. This warning is not repeated.",
            stacklevel=2,
        )
    return bool(names)


def some_of(names: Sequence[str]) -> str:
    """Join names with commas. If there are many names, join the first ones and add the number of remaining names."""
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(names[:NAMED_AT_MOST])}{more}"


def used_by_any(used: Sequence[bool], process_group: dist.ProcessGroup | None, device: torch.device) -> list[bool]:
    """Return for each flag whether it is set on any rank. This runs one small all-reduce and waits for its result."""
    flags = torch.tensor([int(each) for each in used], dtype=torch.int32, device=device)
    if len(flags):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=process_group)
    return [bool(flag) for flag in flags.tolist()]


def first_difference(descriptions: dict[int, list[str]], here: int) -> str:
    """Describe the first entry that differs between ranks, with the ranks of each variant. At least one entry must
    differ.

    Entries are compared by position, so if one is missing on a rank, the following entry is shown in its place.
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
    """Format rank numbers, with ranges: `rank 3`, `ranks 0, 2-5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"


def _description(module: nn.Module) -> list[str]:
    """Describe the properties of parameters and buffers that must be the same before values are broadcast."""
    parameters = [
        f"parameter {name} {_kind(each)}{_layout(each)} {'trainable' if each.requires_grad else 'frozen'}"
        for name, each in module.named_parameters()
    ]
    return parameters + [f"buffer {name} {_kind(each)}" for name, each in module.named_buffers()]


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _layout(tensor: Tensor) -> str:
    """Describe the strides of a tensor if they are not the default ones.

    Strides must agree between ranks, because gradients in buckets have the strides of their parameters.
    """
    return "" if tensor.is_contiguous() else f" strides {tensor.stride()}"


def _gather_bytes(mine: bytes, process_group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Return every rank's bytes. All ranks must pass the same number of bytes."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(received, sent, group=process_group)
    return [bytes(each.tolist()) for each in received]
