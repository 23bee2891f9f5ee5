"""The base class of all data-parallel wrappers: initial broadcast, state dicts, accumulation, virtual shards.

All wrappers are used in the same way:

    model = BucketedDDP(module)                     # parameters and buffers are now those of rank 0
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()         # .grad is now the mean (not the sum) over ranks
    optimizer.step()

If a wrapper communicates during the backward, it has finished when the backward returns. Then
`finish_gradient_synchronization` does nothing.

A *virtual shard* is a slice of the batch whose gradient is kept separate, so that gradients can be added in the same
order on any number of ranks. With n shards per rank, shard s of rank r is number r * n + s.
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

    The constructor is a collective: it broadcasts parameters (including frozen ones) and buffers from the group's rank
    0. Afterwards each rank has its own buffers, such as the running statistics of batch norms. With
    `broadcast_buffers`, as in PyTorch's DDP, every forward that records gradients outside `no_sync()` first broadcasts
    the buffers of rank 0.

    `exact` adds gradients in the order of ranks and virtual shards, then divides. The result is bitwise identical to
    that of one process that accumulates over the same shards, but every virtual shard is sent separately. Gradients are
    sent as `communication_dtype`, except complex ones.

    The first synchronization raises an error if a parameter has no gradient on any rank. Later synchronizations replace
    missing gradients by zeros, so weight decay and momentum still change the parameter; the first time, a warning names
    it. With `find_unused_parameters`, every synchronization checks, and leaves `.grad` None if no rank has a gradient.

    A forward detects parameters that became trainable or frozen, or changed their dtype or device. New tensors are
    compared and broadcast, so every rank must make the same change.

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
        broadcast_buffers: bool = False,
    ) -> None:
        super().__init__()
        if not (
            communication_dtype is None
            or (isinstance(communication_dtype, torch.dtype) and communication_dtype.is_floating_point)
        ):
            raise ValueError(f"communication_dtype must be a floating torch.dtype or None, got {communication_dtype!r}")
        if exact and communication_dtype is not None:
            raise ValueError(f"exact sums are never cast, but communication_dtype is {communication_dtype}; drop one")
        require_member(process_group)
        require_unwrapped(module)
        self.module = module
        self.process_group = process_group
        self.exact = exact
        self.communication_dtype = communication_dtype
        self.broadcast_buffers = broadcast_buffers
        self.ranks = dist.get_world_size(process_group)
        self.find_unused_parameters = find_unused_parameters
        self._known: list[Tensor] = []  # parameters and buffers that are the same on all ranks
        self._seen_trainable: list[TrainableParameter] = []
        self._broadcast_new()
        self._local = False
        self.register_load_state_dict_pre_hook(_named_as_saved)  # type: ignore[no-untyped-call]
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Create the wrapper's state. Parameters and buffers already have the same values on all ranks."""

    def _settings(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks."""
        return {
            "wrapper": type(self).__name__,
            "exact": self.exact,
            "find_unused_parameters": self.find_unused_parameters,
            "communication_dtype": self.communication_dtype,
            "broadcast_buffers": self.broadcast_buffers,
        }

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter or buffer."""
        first = next(iter((*self.module.parameters(), *self.module.buffers())), None)
        return torch.device("cpu") if first is None else first.device

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module. This communicates only if parameters have changed since the last call."""
        if torch.is_grad_enabled():
            self._detect_changes()
            self._share_buffers()
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, only accumulate gradients on this rank. `finish_gradient_synchronization` does nothing."""
        before = self._local
        self._set_local(True)
        try:
            yield
        finally:
            self._set_local(before)

    def next_shard(self) -> None:
        """End the current virtual shard: set its gradients aside, and begin the next shard without gradients.

        Call this between shards, after backwards within `no_sync`, and equally often on every rank. The backwards after
        the last call form the last shard. The final backward must be outside `no_sync`. To abandon a step, call the
        wrapper's `zero_grad()`, which drops its shards.

        Raises:
            RuntimeError: If the wrapper is not exact, or no gradient was computed since the last call.
        """
        if not self.exact:
            raise RuntimeError(
                f"next_shard() needs a fixed order of additions; build the {type(self).__name__} with exact=True"
            )
        self._require_gradients()
        self._close_shard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those of virtual shards."""
        self.forget_shards()
        super().zero_grad(set_to_none)

    def gradients_are_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Accept complete gradients, so that the wrapper can begin to send them. Wrappers without overlap ignore the
        call.

        A pipeline runs its micro-batches within `no_sync()`, where gradients accumulate. It calls this method as soon
        as parameters have received their last contribution, within `no_sync()` or later. Nothing may be added to these
        gradients afterwards. A call of `finish_gradient_synchronization()` outside `no_sync()` completes the step.

        Raises:
            RuntimeError: If a gradient was already reported as ready in this synchronization.
        """

    @abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """Set every `.grad` to the mean over all ranks and their virtual shards."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return statistics of the last synchronization. On CUDA, the host waits until it has ended."""

    def _close_shard(self) -> None:
        """Set the current gradients aside as a virtual shard, and begin the next shard without gradients."""

    def forget_shards(self) -> None:
        """Drop the gradients of virtual shards."""

    def _require_gradients(self) -> None:
        """Check that a backward has computed gradients since the last virtual shard ended.

        Raises:
            RuntimeError: If no parameter has a gradient.
        """
        if all(each.grad is None for _, each in self.trainable()):
            self.forget_shards()
            raise RuntimeError(
                "a virtual shard has no gradient: call next_shard() only between shards, not after the last one, and "
                "only after a backward"
            )

    def _detect_changes(self) -> None:
        """Detect parameters that became trainable or frozen, or changed their dtype or device."""
        now = trainable_parameters(self.module)
        if now != self._seen_trainable:
            self._broadcast_new()
            self._changed()

    def _share_buffers(self) -> None:
        """If `broadcast_buffers` is set, copy rank 0's buffers before a forward whose gradients are averaged."""
        if self.broadcast_buffers and not self._local and self.ranks > 1:
            broadcast_together(list(self.module.buffers()), self.process_group)

    def _broadcast_new(self) -> None:
        """Broadcast parameters and buffers that are new since the last call.

        If there are new ones, this is a collective.
        """
        self._seen_trainable = trainable_parameters(self.module)
        held = [*self.module.parameters(), *self.module.buffers()]
        known = {id(each) for each in self._known}
        if new := [each for each in held if id(each) not in known]:
            require_dense(self.module)
            require_same_parameters(self.module, self.process_group, self.device, self._settings())
            broadcast(new, self.process_group)
            mark_wrapped(self.module, self)
        self._known = held

    def _changed(self) -> None:
        """Update the wrapper after a change of the trainable parameters."""

    def _set_local(self, local: bool) -> None:
        self._local = local

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """List the trainable parameters with their names; list each parameter once."""
        return [(name, each) for name, each in self.module.named_parameters() if each.requires_grad]

    def __getstate__(self) -> Any:
        """Refuse copies and pickles, because a wrapper is tied to its process group and its parameters.

        Raises:
            TypeError: Always. The message says what to do instead.
        """
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} cannot be copied or pickled; copy its .module and wrap that, or save its state_dict()"
        )

    # The wrapper's state dict is that of the module, so it can be loaded with or without a wrapper.

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """Return the module's own state dict."""
        return self.module.state_dict(*args, **keywords)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        """Load a state dict of the module."""
        return self.module.load_state_dict(state_dict, *args, **keywords)

    def named_parameters(self, *args: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with the names that they have in the module."""
        return self.module.named_parameters(*args, **keywords)

    def named_buffers(self, *args: Any, **keywords: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers with the names that they have in the module."""
        return self.module.named_buffers(*args, **keywords)


def _named_as_saved(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Insert "module." into the names of a wrapper's entries, because the state dict of a larger module lacks it."""
    for name in [each for each in state_dict if each.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


class TrainableParameter(NamedTuple):
    """The id, dtype and device of a trainable parameter.

    The id identifies the tensor, because comparing tensors with == compares their elements.
    """

    identity: int
    dtype: torch.dtype
    device: torch.device


def trainable_parameters(module: nn.Module) -> list[TrainableParameter]:
    """List the trainable parameters. A shared parameter is listed several times.

    Every forward calls this function. `module.parameters()` would take three times as long, because it also tracks
    names and duplicates.
    """
    modules, parameters = [module], list[nn.Parameter | None]()
    for each in modules:  # the list grows within the loop
        modules += [child for child in each._modules.values() if child is not None]
        parameters += each._parameters.values()
    return [
        TrainableParameter(id(each), each.dtype, each.device)
        for each in parameters
        if each is not None and each.requires_grad
    ]


def broadcast(tensors: list[Tensor], process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors with those of the group's rank 0. They are sent as bytes, because backends lack some dtypes."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), group=process_group, group_src=0)
        if whole.data_ptr() != tensor.data_ptr():  # a tensor with permuted dimensions was sent as a copy
            tensor.detach().copy_(whole)


@torch.no_grad()
def broadcast_together(tensors: list[Tensor], process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors with those of the group's rank 0, in one message for each device."""
    for device in dict.fromkeys(each.device for each in tensors):
        here = [each for each in tensors if each.device == device and each.numel()]
        if not here:
            continue
        message = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in here])
        dist.broadcast(message, group=process_group, group_src=0)
        parts = torch.split(message, [each.numel() * each.itemsize for each in here])
        for each, part in zip(here, parts, strict=True):
            # Copy the bytes, because a view with another dtype needs an aligned start.
            each.copy_(part.clone().view(each.dtype).view(each.shape))
