"""Point-to-point messages between the ranks of a group, and checks of the tensors to send."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = dist.ProcessGroup | None
Chunks: TypeAlias = Tensor | Sequence[Tensor]
Message: TypeAlias = tuple[Tensor, int]  # a tensor, and the rank in the group that sends or receives it

# torch's collectives of flat tensors. torch 2.13 has renamed both and warns about the old names.
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def begin(group: Group, *, sends: Iterable[Message] = (), receives: Iterable[Message] = ()) -> list[dist.Work]:
    """Start messages to and from ranks of the group; return the work handles to wait for. Empty tensors are not sent.

    Receives start first, so that gloo's senders find a buffer. On GPUs all messages form one batch, because NCCL would
    otherwise run them one after another. gloo needs no batch, and without it a short message takes a third less time.
    """
    coming = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
    going = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
    if any(tensor.is_cuda for tensor, _ in (*coming, *going)):
        batch = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in coming]
        batch += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in going]
        return dist.batch_isend_irecv(batch)
    works = [dist.irecv(tensor, group=group, group_src=peer) for tensor, peer in coming]
    works += [dist.isend(tensor, group=group, group_dst=peer) for tensor, peer in going]
    return [work for work in works if work is not None]


def timeout_of(group: Group, device: torch.device) -> timedelta:
    """Return a group's current timeout for messages of tensors on a device."""
    backend: Any = (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
    timeout: timedelta = backend.options._timeout
    return timeout


def wait(works: list[dist.Work]) -> None:
    """Wait for messages; on a GPU the current stream waits."""
    for work in works:
        work.wait()


class Peers:
    """This rank and the other ranks of a group, with checks of the tensors to send."""

    def __init__(self, group: Group, root: int = 0) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._like: Tensor | None = None  # the first checked tensor; all others must have its type and device
        if self.rank < 0:
            raise ValueError("this rank is not in the group; call this only on ranks of the group")
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not in the group; pass one of its ranks, 0 to {self.size - 1}")

    @cached_property
    def timeout(self) -> timedelta:
        """The group's current timeout for messages."""
        return timeout_of(self.group, torch.device("cpu"))

    def wait(self, works: list[dist.Work]) -> None:
        """Wait for messages; on a GPU the current stream waits.

        The timeout is passed explicitly, because gloo's messages would otherwise use the timeout with which the group
        was created.
        """
        if self._like is None or self._like.is_cuda:
            wait(works)
            return
        for work in works:
            work.wait(self.timeout)

    def check(self, tensors: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return detached tensors, after checking that they are flat and contiguous, and share one dtype and device."""
        for index, each in enumerate(tensors):
            self._check(each, f"{name}[{index}]" if len(tensors) > 1 else name)
        return [each.detach() for each in tensors]

    def check_one(self, one: Tensor, other: Tensor, name: str, other_name: str) -> None:
        """Check that two tensors have the same length."""
        self._check(one, name)
        if one.numel() != other.numel():
            raise ValueError(f"{name} has {one.numel()} elements, {other_name} has {other.numel()}; make them equal")

    def _check(self, tensor: Tensor, name: str) -> None:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; flatten it first")
        if self._like is None:
            self._like = tensor
            if tensor.is_cuda and dist.get_backend(self.group) == "gloo":
                raise ValueError(f"{name} is on {tensor.device}: gloo sends only from the CPU; use NCCL, or copy it")
        if tensor.dtype != self._like.dtype or tensor.device != self._like.device:
            found, wanted = f"{tensor.dtype} on {tensor.device}", f"{self._like.dtype} on {self._like.device}"
            raise ValueError(f"{name} is {found}, but others are {wanted}; use the same type and device")

    def post(self, *, sends: Iterable[Message] = (), receives: Iterable[Message] = ()) -> list[dist.Work]:
        """Start messages, as `begin` does. Ranks are taken modulo the size of the group."""
        return begin(
            self.group,
            sends=[(tensor, peer % self.size) for tensor, peer in sends],
            receives=[(tensor, peer % self.size) for tensor, peer in receives],
        )


def chunks_of(tensor: Tensor, count: int) -> list[Tensor]:
    """Cut a flat tensor into `count` views whose lengths differ by at most one, longer ones first."""
    return list(tensor.tensor_split(count))


def parts_of(chunks: Chunks, count: int) -> Sequence[Tensor]:
    """Return chunks as a sequence of `count` tensors, one per rank."""
    parts = chunks_of(chunks, count) if isinstance(chunks, Tensor) else chunks
    if len(parts) != count:
        raise ValueError(f"got {len(parts)} chunks for {count} ranks; pass one for each rank of the group")
    return parts


def copy(source: Tensor, target: Tensor) -> None:
    """Copy a tensor, unless source and target are the same memory."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
