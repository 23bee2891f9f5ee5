"""The base class of all data-parallel wrappers: equal initial values, state dicts, micro-batches, virtual shards.

All wrappers are used in the same way:

    model = BucketedDDP(module)                     # parameters and buffers are now those of rank 0
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()         # .grad is now the mean (not the sum) over ranks
    optimizer.step()

Wrappers that communicate during the backward are finished when it returns; calling
`finish_gradient_synchronization` then does nothing.

A *virtual shard* is a slice of the batch whose gradient is kept separate, so that the sum can be taken in the same
order for any number of ranks: shard s of rank r has the number r * shards + s.
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

    Building one is a collective: parameters (including frozen ones) and buffers are broadcast from the group's rank 0.
    Buffers are not synchronized afterwards: the running statistics of batch norms are separate on each rank, while
    their parameters are trained with the gradients of all ranks.

    `exact` adds in the order of ranks (and virtual shards), then divides. This gives the bits of one process that
    accumulates over the same shards, but sends `shards` times as many bytes. `communication_dtype` is the type in which
    gradients are sent, except complex ones.

    Parameters without a gradient on any rank are detected at the first synchronization. Later, a missing gradient
    counts as zeros, with which weight decay or momentum still moves the parameter. `find_unused_parameters` checks
    every time, and leaves `.grad` None if no rank has a gradient.

    A forward detects parameters that became trainable or frozen, or changed their type. New tensors are compared and
    broadcast, so every rank must make the same change.

    Raises:
        ValueError: If the module is already wrapped, a parameter or buffer is not dense, this rank is not in the group,
            a setting is invalid, or ranks differ in a setting or in the name, shape or type of a parameter or buffer.
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
        """Create everything the wrapper keeps between steps. The module is already the same on all ranks."""

    def _settings(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks."""
        return {
            "wrapper": type(self).__name__,
            "exact": self.exact,
            "find_unused_parameters": self.find_unused_parameters,
            "communication_dtype": self.communication_dtype,
        }

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter or buffer."""
        first = next(iter((*self.module.parameters(), *self.module.buffers())), None)
        return torch.device("cpu") if first is None else first.device

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module. Communicates only if its parameters have changed."""
        if torch.is_grad_enabled():
            self._keep_up()
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients only on this rank within the block; finishing does nothing there."""
        before = self._local
        self._set_local(True)
        try:
            yield
        finally:
            self._set_local(before)

    def next_shard(self) -> None:
        """Begin the next virtual shard; the gradients so far are kept as those of the current one.

        Call it between shards, after backwards within `no_sync`, equally often on every rank. Everything after the last
        call is the last shard, whose last backward is outside `no_sync`. To abandon a step, call the wrapper's
        `zero_grad()`, which drops its shards.

        Raises:
            RuntimeError: If the wrapper is not exact, or there is no gradient since the last call.
        """
        if not self.exact:
            raise RuntimeError(
                f"next_shard(): {type(self).__name__} adds in no promised order; build it with exact=True"
            )
        self._require_gradients()
        self._close_shard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those of virtual shards."""
        self.forget_shards()
        super().zero_grad(set_to_none)

    def gradients_are_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Accept complete gradients from a caller outside of a backward, and send what can be sent.

        A pipeline runs its micro-batches within `no_sync()`, where gradients accumulate. It calls this as soon as
        parameters have their last contribution, within `no_sync()` or later. Nothing more may be added to these
        gradients. Afterwards `finish_gradient_synchronization()`, outside of `no_sync()`, does the rest.

        Raises:
            RuntimeError: If one was already reported as ready in this synchronization.
        """

    @abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """Set every `.grad` to the mean over all shards: over ranks, or ranks x virtual shards if any was closed."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return statistics of the last synchronization. On CUDA the host waits for its end."""

    def _close_shard(self) -> None:
        """Set aside the gradients so far as a virtual shard, and begin the next one without any."""

    def forget_shards(self) -> None:
        """Drop the gradients of virtual shards."""

    def _require_gradients(self) -> None:
        """Check that there is a gradient since the last shard was closed.

        Raises:
            RuntimeError: If there is none.
        """
        if all(each.grad is None for _, each in self.trainable()):
            self.forget_shards()
            raise RuntimeError(
                "a virtual shard without any gradient: call next_shard() between shards only, not after the last one, "
                "and only after a backward"
            )

    def _keep_up(self) -> None:
        """Detect changes of which parameters are trainable, and of their types."""
        now = learning(self.module)
        if now != self._learnt:
            self._welcome()
            self._changed()

    def _welcome(self) -> None:
        """Make new tensors the same on all ranks. A collective if there are any."""
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
        """React to a change of the trainable parameters."""

    def _set_local(self, local: bool) -> None:
        self._local = local

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """List the trainable parameters with their names, each once."""
        return [(name, each) for name, each in self.module.named_parameters() if each.requires_grad]

    def __getstate__(self) -> Any:
        """Refuse to be copied or pickled, because communication is tied to a group and to these parameters.

        Raises:
            TypeError: Always; the message says what to copy or save instead.
        """
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} cannot be copied or pickled; copy its .module and wrap that, or save its state_dict()"
        )

    # The wrapper's state dict is the module's: it loads with and without a wrapper.

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
    """Load a wrapper inside a larger module: its entries were saved without "module." in their names."""
    for name in [each for each in state_dict if each.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


class Learning(NamedTuple):
    """A trainable parameter as last seen, by id, because tensors compare elementwise."""

    identity: int
    dtype: torch.dtype
    device: torch.device


def learning(module: nn.Module) -> list[Learning]:
    """List the trainable parameters; a shared one occurs several times.

    `module.parameters()` also tracks names and duplicates, which takes three times as long, and every forward calls
    this.
    """
    modules, parameters = [module], list[nn.Parameter | None]()
    for each in modules:  # grows
        modules += [child for child in each._modules.values() if child is not None]
        parameters += each._parameters.values()
    return [
        Learning(id(each), each.dtype, each.device) for each in parameters if each is not None and each.requires_grad
    ]


def broadcast(tensors: list[Tensor], process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors with those of the group's rank 0, as bytes, because backends do not support all types."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), group=process_group, group_src=0)
        if whole.data_ptr() != tensor.data_ptr():  # a tensor with permuted dimensions was sent as a copy
            tensor.detach().copy_(whole)
