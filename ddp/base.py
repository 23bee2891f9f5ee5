"""What every data-parallel wrapper here shares: equal starts, the module's own names, micro-batches, virtual shards.

All are used in one way:

    model = BucketedDDP(module)                     # parameters and buffers are now those of rank 0
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()         # .grad is now the mean over ranks: the mean, not the sum
    optimizer.step()

Wrappers that communicate during the backward have finished when it returns; to ask them to finish is harmless then.

A *virtual shard* is a slice of the batch whose gradient is kept apart, so that the sum can be taken in one order
whatever the number of ranks: shard s of rank r is number r * shards + s.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.checks import mark_wrapped, require_dense, require_member, require_same_parameters, require_unwrapped
from muster.ddp.stats import Stats


class DataParallel(nn.Module, ABC):
    """Wrap a module so that its gradients become their mean over the ranks of a group.

    Building one is a collective: parameters (frozen ones too) and buffers are broadcast from the group's rank 0.
    Buffers are not synchronized after that: batch norm's running statistics are each rank's own, while its parameters
    learn from all.

    `exact` adds in the order of ranks (and virtual shards), then divides: the bits of one process that accumulates over
    the same shards, at the price of `shards` x the bytes. `communication_dtype` is what gradients are sent as, but for
    complex ones.

    Which parameters nobody uses is judged at the first synchronization. Later a missing gradient counts as zeros, with
    which an optimizer with weight decay or momenta still moves the parameter; `find_unused_parameters` asks every time,
    and leaves `.grad` None where no rank has one.

    A forward notices when other parameters learn than before, or of another type; tensors that are new to it are
    compared and broadcast, so every rank must make the same change.

    Raises:
        ValueError: the module is wrapped already, a parameter or buffer is not dense, this rank is not in the group, a
            setting cannot be, or the ranks differ in a setting, or in name, shape or type of a parameter or buffer.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        exact: bool = False,
        find_unused_parameters: bool = False,
        communication_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not (
            communication_dtype is None
            or (isinstance(communication_dtype, torch.dtype) and communication_dtype.is_floating_point)
        ):
            raise ValueError(f"communication_dtype must be a floating torch.dtype or None, got {communication_dtype!r}")
        if exact and communication_dtype is not None:
            raise ValueError(f"exact sums are sent as they are, communication_dtype is {communication_dtype}; drop one")
        require_member(process_group)
        require_unwrapped(module)
        self.module = module
        self.process_group = process_group
        self.exact = exact
        self.communication_dtype = communication_dtype
        self.ranks = dist.get_world_size(process_group)
        self.find_unused_parameters = find_unused_parameters
        self._known: list[Tensor] = []  # parameters and buffers that are the same on all ranks
        self._learnt: list[Learning] = []
        self._welcome()
        self._local = False
        self.register_load_state_dict_pre_hook(_named_as_saved)  # type: ignore[no-untyped-call]
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the wrapper keeps from step to step; the module is the same on all ranks now."""

    def _settings(self) -> dict[str, object]:
        """Return what must be the same on all ranks beside the module."""
        return {
            "wrapper": type(self).__name__,
            "exact": self.exact,
            "find_unused_parameters": self.find_unused_parameters,
            "communication_dtype": self.communication_dtype,
        }

    @property
    def device(self) -> torch.device:
        """Where the module is: the device of its first parameter or buffer."""
        first = next(iter((*self.module.parameters(), *self.module.buffers())), None)
        return torch.device("cpu") if first is None else first.device

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module; nothing is communicated, unless its parameters are others than before."""
        if torch.is_grad_enabled():
            self._keep_up()
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients of forwards and backwards only accumulate on this rank: finishing does nothing."""
        before = self._local
        self._set_local(True)
        try:
            yield
        finally:
            self._set_local(before)

    def next_shard(self) -> None:
        """Begin the next virtual shard: the gradients so far are kept apart as those of this one.

        Call it between shards, after backwards within `no_sync`; every rank as often. What follows the last call is the
        last shard, whose last backward is outside `no_sync`. `zero_grad()` of the wrapper forgets the shards of a step
        that is given up.

        Raises:
            RuntimeError: the wrapper does not promise an order, or no gradient has come since the last call.
        """
        if not self.exact:
            raise RuntimeError(
                f"next_shard(): {type(self).__name__} adds in no promised order; build it with exact=True"
            )
        self._require_gradients()
        self._close_shard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of virtual shards too."""
        self.forget_shards()
        super().zero_grad(set_to_none)

    def gradients_are_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hear that gradients are whole, from who makes them outside of a backward; what can be sent, is.

        A pipeline runs its micro-batches within `no_sync()`, where gradients add up, and says so here, there or later,
        as soon as parameters have had their last one. Nothing more may be added to these. Afterwards
        `finish_gradient_synchronization()`, out of `no_sync()`, does the rest.

        Raises:
            RuntimeError: one was said to be ready before in this synchronization.
        """

    @abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """Make every `.grad` the mean over all shards: over ranks, or over ranks x virtual shards if any was closed."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return what the last synchronization took; on CUDA the host waits for it to have ended."""

    def _close_shard(self) -> None:
        """Keep the gradients so far apart, and begin again without any."""

    def forget_shards(self) -> None:
        """Drop the gradients of virtual shards."""

    def _require_gradients(self) -> None:
        """Check that a gradient has come since the last shard was closed.

        Raises:
            RuntimeError: none has.
        """
        if all(each.grad is None for _, each in self.trainable()):
            self.forget_shards()
            raise RuntimeError(
                "a virtual shard without any gradient: call next_shard() between shards only, not after the last one, "
                "and only after a backward"
            )

    def _keep_up(self) -> None:
        """Notice that other parameters learn than before, or in another type."""
        now = learning(self.module)
        if now != self._learnt:
            self._welcome()
            self._changed()

    def _welcome(self) -> None:
        """Make tensors that are new the same on all ranks: a collective."""
        self._learnt = learning(self.module)
        held = [*self.module.parameters(), *self.module.buffers()]
        known = {id(each) for each in self._known}
        if new := [each for each in held if id(each) not in known]:
            require_dense(self.module)
            require_same_parameters(self.module, self.process_group, self.device, self._settings())
            broadcast(new, self.process_group)
            mark_wrapped(self.module, self)
        self._known = held

    def _changed(self) -> None:
        """Hear that other parameters learn than before."""

    def _set_local(self, local: bool) -> None:
        self._local = local

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """List the parameters that learn, with their names, each once."""
        return [(name, each) for name, each in self.module.named_parameters() if each.requires_grad]

    def __getstate__(self) -> Any:
        """Refuse to be copied or saved: what communicates belongs to its group and to these very parameters.

        Raises:
            TypeError: always; the message says what to copy or save.
        """
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} cannot be copied or pickled; copy its .module and wrap that, or save its state_dict()"
        )

    # A state dict of the wrapper is one of the module: what was saved without a wrapper loads with one, and back.

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """Return the module's own state dict."""
        return self.module.state_dict(*args, **keywords)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        """Load a state dict of the module."""
        return self.module.load_state_dict(state_dict, *args, **keywords)

    def named_parameters(self, *args: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by the module's own names."""
        return self.module.named_parameters(*args, **keywords)

    def named_buffers(self, *args: Any, **keywords: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by the module's own names."""
        return self.module.named_buffers(*args, **keywords)


def _named_as_saved(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a wrapper that is a part of a larger module: its entries were saved without a "module." between."""
    for name in [each for each in state_dict if each.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


class Learning(NamedTuple):
    """A parameter that learns, as it was seen: by identity, for tensors compare by element."""

    identity: int
    dtype: torch.dtype
    device: torch.device


def learning(module: nn.Module) -> list[Learning]:
    """List the trainable parameters, a shared one more than once.

    `module.parameters()` does that with names and sets, in three times the time: every forward asks.
    """
    modules, parameters = [module], list[nn.Parameter | None]()
    for each in modules:  # grows
        modules += [child for child in each._modules.values() if child is not None]
        parameters += each._parameters.values()
    return [
        Learning(id(each), each.dtype, each.device) for each in parameters if each is not None and each.requires_grad
    ]


def broadcast(tensors: list[Tensor], process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors with those of the group's rank 0, byte by byte: backends do not know all types."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), group=process_group, group_src=0)
        if whole.data_ptr() != tensor.data_ptr():  # a permuted layout was sent as a copy
            tensor.detach().copy_(whole)
