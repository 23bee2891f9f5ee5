"""Base class of `ShardedDataParallel`: its optimizers, state dicts and whole parameters."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muster.ddp.base import DataParallel, trainable_parameters
from muster.ddp.checks import require_dense, some_of, unmark_wrapped
from muster.ddp.gradients import Named
from muster.ddp.means import Wait
from muster.ddp.timeouts import Entered, waiting_for
from muster.zero.absent import as_it_is
from muster.zero.apart import require_own_memory
from muster.zero.flat import FlatParameters, ParameterRange, mend
from muster.zero.gather import Gather
from muster.zero.layout import Slice
from muster.zero.optimizer import ShardedOptimizer
from muster.zero.sources import Source
from muster.zero.whole import Residency, Unwrapped


class Sharded(DataParallel):
    """A wrapper whose parameters lie in flat tensors (`flat_parameters`). Each rank owns a shard of each flat tensor.

    `residency` gathers and frees parameters. `on_wait` is called with True before and False after every wait in a step.

    Values that the user writes to parameters between steps are kept, and must be the same on all ranks. To write 16-bit
    parameters that have masters, call `load_state_dict`, or write within `gather_full(writes=True)`.
    """

    flat_parameters: Sequence[FlatParameters]
    residency: Residency
    gather: Gather
    on_wait: Callable[[bool], None] | None = None
    _spreads = 0  # number of updates of the parameters from their shards

    def optimizer(
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        params_or_groups: Iterable[Any] | None = None,
        *,
        masters: bool = True,
        **kwargs: Any,
    ) -> ShardedOptimizer:
        """Build an optimizer of this rank's shards, by default of all trainable parameters.

        Raises:
            ValueError: If the optimizer needs whole tensors, or a parameter does not belong to the wrapped module.
        """
        if not masters and any(each.is_cast for each in self.flat_parameters):
            raise ValueError(
                "masters=False contradicts compute_dtype, whose float32 parameters are the masters; drop it"
            )
        given = [each for _, each in self.trainable()] if params_or_groups is None else params_or_groups
        return ShardedOptimizer(given, optimizer_cls, masters=masters, source=Joined(self), **kwargs)

    def _broadcast_new(self) -> None:
        require_dense(self.module)
        require_own_memory(self.module)
        super()._broadcast_new()

    def synchronize(self) -> None:
        """Wait for parameters that are being gathered after a step (stages 1 and 2)."""
        self.residency.synchronize()

    @contextmanager
    def gather_full(self, *, writes: bool = False) -> Iterator[nn.Module]:
        """Keep all parameters whole on every rank within the block, for evaluation or export. A collective.

        With `writes`, keep values that the block writes to parameters. These values must be the same on all ranks.
        """
        with self.residency.all_open():
            yield self.module
            if writes:
                mend(self.flat_parameters)
                for flat_parameter in self.flat_parameters:
                    flat_parameter.adopt()
                self.gather.written()

    def unwrap(self) -> nn.Module:
        """Return the module with whole parameters in their own memory on every rank. A collective.

        Afterwards neither this wrapper nor its optimizers can be used. Parameters have no gradients.
        """
        with self.gather_full() as module, torch.no_grad():
            stored = self._stored()
            whole = [
                [stored.get(each.data_ptr(), each.detach()).clone() for each in flat_parameter.parameters]
                for flat_parameter in self.flat_parameters
            ]
        self.zero_grad()
        self._let_go()
        for flat_parameter, tensors in zip(self.flat_parameters, whole, strict=True):
            flat_parameter.give_up(tensors)
        unmark_wrapped(module)
        self.flat_parameters, self.residency = (), Unwrapped()
        return module

    def _let_go(self) -> None:
        """Remove the hooks from the module and its parameters."""
        self.residency.remove()

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the whole mean gradient of each parameter that has one, by name. A collective."""
        unused = self.unused
        whole: dict[str, Tensor] = {}
        for flat_parameter in self.flat_parameters:
            if flat_parameter.grad is None:
                continue
            flat = torch.empty(
                flat_parameter.layout.length, dtype=flat_parameter.grad.dtype, device=flat_parameter.device
            )
            self._wait_for(flat_parameter, self.gather.start(flat_parameter, flat_parameter.grad, flat))
            views = zip(flat_parameter.names, flat_parameter.views_of(flat), strict=True)
            whole |= {name: view for name, view in views if name not in unused}
        return whole

    def _stored(self) -> dict[int, Tensor]:
        """Gather the float32 masters of cast parameters; return them by the memory address of the whole cast parameter.

        Call it within `gather_full()`.
        """
        found = {}
        for each in self.flat_parameters:
            if each.is_cast:
                flat = torch.empty(each.layout.length, dtype=each.stored_dtype, device=each.device)
                self._wait_for(each, self.gather.start(each, each.stepped, flat))
                views = zip(each.parameters, each.views_of(flat), strict=True)
                found.update({parameter.data_ptr(): view for parameter, view in views if parameter.numel()})
        return found

    def __getstate__(self) -> Any:
        """Refuse copies and pickles, as every wrapper does. A copied module would also lack whole parameters.

        Raises:
            TypeError: Always. The message names alternatives.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; save its state_dict(), or get the module with "
            "unwrap() and copy that"
        )

    def held_parameters(self) -> list[ParameterRange]:
        """List the ranges of parameters in this rank's shards. After writing to them, call `refresh`."""
        self.synchronize()
        return [each for flat_parameter in self.flat_parameters for each in flat_parameter.held()]

    def refresh(self, *, masters: bool = False) -> None:
        """Update parameters from their shards, or if `masters` is set, from rounded masters. A collective."""
        for flat_parameter in self.flat_parameters:
            if masters:
                flat_parameter.write_back()
            elif flat_parameter.has_masters():
                flat_parameter.stepped.copy_(flat_parameter.shard)
                flat_parameter.write_back()
        self._spreads += 1
        self.residency.spread(self.flat_parameters)
        self.synchronize()

    def spread(self) -> None:
        """Update the parameters from their shards after a step."""
        flat_parameters = [flat_parameter for flat_parameter in self.flat_parameters if flat_parameter.trains]
        for flat_parameter in flat_parameters:
            flat_parameter.write_back()
        self._spreads += 1
        self.residency.spread(flat_parameters)

    def gather_late(self) -> None:
        """From now on, begin to gather stepped parameters when they are needed, not right after the step.

        A CUDA graph of a step then contains its gathers. Stages 1 and 2 only. Reading a parameter between a step and
        the next forward becomes a collective.
        """
        self.residency.late = True

    def shards_changed(self) -> None:
        """Record that a replayed CUDA graph has stepped the shards. Requires `gather_late`."""
        self.residency.changed([each for each in self.flat_parameters if each.trains])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, whole or sharded, or replace them by zeros, with which a step changes parameters."""
        self.forget_shards()
        with as_it_is():
            for flat_parameter in self.flat_parameters:
                flat_parameter.drop_gradient(set_to_none=set_to_none)
                for each in flat_parameter.parameters:
                    each.grad = None if set_to_none or each.grad is None else each.grad.detach().zero_()

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """Return the module's own state dict with whole tensors. In stage 3 this is a collective and copies tensors."""
        with self.gather_full():
            stored = self._stored()
            whole = self.module.state_dict(*args, **keywords)
            for name, each in whole.items():
                if isinstance(each, Tensor) and (exact := stored.get(each.data_ptr())) is not None:
                    whole[name] = exact
            freed = {
                flat_parameter.full.untyped_storage()._cdata
                for flat_parameter in self.flat_parameters
                if flat_parameter.is_split
            }
            for name, each in whole.items():
                if isinstance(each, Tensor) and each.untyped_storage()._cdata in freed:
                    whole[name] = each.detach().clone()
            return whole

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        """Load a state dict of the module. The state dict must be the same on every rank. In stage 3 this is a
        collective.

        Raises:
            ValueError: With `assign`, which would replace the sharded parameters.
        """
        if keywords.get("assign"):
            raise ValueError("assign=True would replace the sharded parameters; load without it, or before wrapping")
        with self.gather_full(writes=True):
            keys = self.module.load_state_dict(state_dict, *args, **keywords)
        if cast := [each for each in self.flat_parameters if each.is_cast]:
            for each in cast:
                each.load_unrounded(state_dict)
            self.refresh(masters=True)
        return keys

    def named_parameters(self, *args: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names in the module. In stages 1 and 2, wait for gathers first."""
        self.synchronize()
        return super().named_parameters(*args, **keywords)

    @property
    @abstractmethod
    def unused(self) -> frozenset[str]:
        """Names of the parameters that no rank used in the last step."""

    def _detect_changes(self) -> None:
        """Refuse parameters that were replaced after sharding, or became trainable or frozen."""
        with as_it_is():
            if trainable_parameters(self.module) == self._seen_trainable:
                return
        wrapped = {
            (id(each), flat_parameter.dtype, flat_parameter.device): name
            for flat_parameter in self.flat_parameters
            if flat_parameter.trains
            for name, each in flat_parameter.named
        }
        now = {(id(each), each.dtype, each.device): name for name, each in self.trainable()}
        changed = sorted({(wrapped | now)[key] for key in wrapped.keys() ^ now.keys()})
        raise RuntimeError(
            f"{some_of(changed) or 'names or order of parameters'}: changed after the module was sharded; "
            "freeze, replace and convert parameters before wrapping, or get the module back with unwrap(), change it, "
            "and build a new wrapper and optimizer"
        )

    def _apply(self, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError(
            "a sharded module cannot be moved or converted: its parameters are views of flat tensors; "
            "call to(), half() and similar methods before wrapping"
        )

    def _notify_wait(self, waits: bool) -> None:
        if self.on_wait is not None:
            self.on_wait(waits)

    def _wait_for(self, flat_parameter: FlatParameters, wait: Wait) -> None:
        """Wait for a flat tensor to be gathered. If the wait times out, the error message names the flat tensor."""
        self._notify_wait(True)
        try:
            with waiting_for(partial(self._entered, flat_parameter), self.process_group):
                wait()
        finally:
            self._notify_wait(False)

    def _entered(self, flat_parameter: FlatParameters) -> Entered:
        """Describe the flat tensor whose gather has failed."""
        place, count = (
            next(n for n, each in enumerate(self.flat_parameters) if each is flat_parameter),
            len(self.flat_parameters),
        )
        launched = place + 1 if flat_parameter.is_split else count
        names = flat_parameter.names[0], flat_parameter.names[-1]
        return Entered(self._spreads, place, count, launched, *names, flat_parameter.full_bytes, what="flat parameters")

    def weakly(self) -> Callable[[FlatParameters, Wait], None]:
        """Return a wait function for module hooks. The function holds only a weak reference to the wrapper."""
        me = weakref.ref(self)

        def wait_for(flat_parameter: FlatParameters, wait: Wait) -> None:
            wait() if (alive := me()) is None else alive._wait_for(flat_parameter, wait)

        return wait_for


class Joined(Source):
    """The source of a wrapper's optimizer. Gradients arrive as shards, and the wrapper gathers parameters."""

    def __init__(self, wrapper: Sharded) -> None:
        self.wrapper = wrapper
        self.group = wrapper.process_group
        self.exact = wrapper.exact
        self._mine: set[int] = set()  # ids of this optimizer's parameters
        # Vector kernels round the last elements of a tensor differently, so exact steps do not join parameters.
        self.joins = not wrapper.find_unused_parameters and not wrapper.exact

    def flat_parameters(self, parameters: Named) -> list[FlatParameters]:
        known = {id(each) for flat_parameter in self.wrapper.flat_parameters for each in flat_parameter.parameters}
        if strange := [name for name, each in parameters if id(each) not in known]:
            raise ValueError(
                f"parameter {strange[0]} of a group does not belong to the wrapped module; pass only its parameters"
            )
        asked = {id(each) for _, each in parameters}
        self._mine |= asked
        return [
            flat_parameter
            for flat_parameter in self.wrapper.flat_parameters
            if flat_parameter.trains and any(id(each) in asked for each in flat_parameter.parameters)
        ]

    def mend(self) -> None:
        """Wait for gathers in progress, and accept parameters whose `.data` was set."""
        self.wrapper.synchronize()
        mend(self.wrapper.flat_parameters)

    def collect(self) -> None:
        """Check that gradients are shards from a synchronized backward.

        Raises:
            RuntimeError: If a parameter has a gradient that only this rank has.
        """
        with as_it_is():
            left = [
                name for flat_parameter, name, each in self._own() if each.grad is not None and flat_parameter.trains
            ]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise RuntimeError(
                f"{left[0]}{more}: has a .grad that was not averaged over ranks, so a step would ignore it; run the "
                "last backward outside no_sync(), and do not set .grad yourself"
            )

    def _own(self) -> Iterator[tuple[FlatParameters, str, nn.Parameter]]:
        """Yield this optimizer's parameters, each with its flat tensor and name."""
        for flat_parameter in self.wrapper.flat_parameters:
            for name, each in flat_parameter.named:
                if id(each) in self._mine:
                    yield flat_parameter, name, each

    def gradient(self, flat_parameter: FlatParameters, slices: Sequence[Slice]) -> Tensor | None:
        """View a part of the gradient's shard. Return None for a parameter that no rank has used."""
        unused = self.wrapper.unused
        if flat_parameter.grad is None or (unused and any(flat_parameter.names[at.tensor] in unused for at in slices)):
            return None
        return flat_parameter.grad[slices[0].offset : slices[-1].offset + slices[-1].elements]

    def clipped_with(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the shards, because no rank has whole gradients."""
        return shards

    def spread(self) -> None:
        self.wrapper.spread()

    def forget(self, *, set_to_none: bool) -> None:
        """Drop the shards of this optimizer's gradients. Other optimizers of the wrapper keep their gradients."""
        for flat_parameter in {id(flat_parameter): flat_parameter for flat_parameter, _, _ in self._own()}.values():
            if all(id(each) in self._mine for each in flat_parameter.parameters):
                flat_parameter.drop_gradient(set_to_none=set_to_none)
            elif flat_parameter.grad is not None:
                for at in flat_parameter.slices:
                    if id(flat_parameter.parameters[at.tensor]) in self._mine:
                        flat_parameter.of(flat_parameter.grad, at).zero_()
        self.wrapper.forget_shards()
