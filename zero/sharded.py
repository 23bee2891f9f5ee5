"""Base class of wrappers whose parameters, or optimizer state, are sharded, whatever the stage."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muster.ddp.base import DataParallel, learning
from muster.ddp.checks import require_dense, some_of, unmark_wrapped
from muster.ddp.means import Wait
from muster.ddp.timeouts import Entered, waiting_for
from muster.zero.absent import as_it_is
from muster.zero.apart import require_own_memory
from muster.zero.flat import FlatParameters, Held, mend
from muster.zero.gather import Gather
from muster.zero.optimizer import ShardedOptimizer
from muster.zero.sources import Joined
from muster.zero.whole import Gone, Presence


class Sharded(DataParallel):
    """A module whose parameters are in flat tensors, `homes`; each rank owns one shard of each.

    `presence` gathers and frees parameters. `on_wait` is called with True before and False after every wait in a step.

    Values written to parameters between steps count, if they are the same on all ranks. 16-bit parameters with masters
    are written by `load_state_dict`, or within `gather_full(writes=True)`.
    """

    homes: Sequence[FlatParameters]
    presence: Presence
    gather: Gather
    on_wait: Callable[[bool], None] | None = None
    _spreads = 0  # number of times that parameters were updated from their shards

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
        given = [each for _, each in self.trainable()] if params_or_groups is None else params_or_groups
        return ShardedOptimizer(given, optimizer_cls, masters=masters, source=Joined(self), **kwargs)

    def _welcome(self) -> None:
        require_dense(self.module)
        require_own_memory(self.module)
        super()._welcome()

    def synchronize(self) -> None:
        """Wait for parameters that are being gathered after a step (stages 1 and 2)."""
        self.presence.synchronize()

    @contextmanager
    def gather_full(self, *, writes: bool = False) -> Iterator[nn.Module]:
        """Keep all parameters whole on every rank within the block, for evaluation or export. A collective.

        With `writes`, values written to the parameters within the block, the same on all ranks, are kept.
        """
        with self.presence.all_open():
            yield self.module
            if writes:
                mend(self.homes)
                for home in self.homes:
                    home.adopt()
                self.gather.written()

    def unwrap(self) -> nn.Module:
        """Return the module, whole on every rank and with its own memory, for another use. A collective.

        Afterwards neither this wrapper nor an optimizer from `optimizer()` can be used. Parameters have no gradients.
        """
        with self.gather_full() as module, torch.no_grad():
            whole = [[each.detach().clone() for each in home.parameters] for home in self.homes]
        self.zero_grad()
        self._let_go()
        for home, tensors in zip(self.homes, whole, strict=True):
            home.give_up(tensors)
        unmark_wrapped(module)
        self.homes, self.presence = (), Gone()
        return module

    def _let_go(self) -> None:
        """Remove the hooks from the module and its parameters."""
        self.presence.remove()

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the whole mean gradients of the parameters that have one. A collective."""
        unused = self.unused
        whole: dict[str, Tensor] = {}
        for home in self.homes:
            if home.grad is None:
                continue
            flat = torch.empty(home.layout.length, dtype=home.grad.dtype, device=home.device)
            self._wait_for(home, self.gather.start(home, home.grad, flat))
            views = zip(home.names, home.views_of(flat), strict=True)
            whole |= {name: view for name, view in views if name not in unused}
        return whole

    def held_parameters(self) -> list[Held]:
        """List the ranges of all parameters in this rank's shards. After filling them, call `refresh`."""
        self.synchronize()
        return [each for home in self.homes for each in home.held()]

    def refresh(self, *, masters: bool = False) -> None:
        """Update parameters from their shards, or with `masters` from rounded masters. A collective."""
        for home in self.homes:
            if masters:
                home.write_back()
            elif home.has_masters():
                home.stepped.copy_(home.shard)
                home.write_back()
        self._spreads += 1
        self.presence.spread(self.homes)
        self.synchronize()

    def spread(self) -> None:
        """Update the parameters from their shards after a step."""
        homes = [home for home in self.homes if home.trains]
        for home in homes:
            home.write_back()
        self._spreads += 1
        self.presence.spread(homes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, whole ones and shards. `set_to_none` is ignored, because there is nothing to zero."""
        self.forget_shards()
        with as_it_is():
            for home in self.homes:
                home.drop_gradient()
                for each in home.parameters:
                    each.grad = None

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """Return the module's own state dict with whole tensors. In stage 3 a collective, and tensors are copies."""
        with self.gather_full():
            whole = self.module.state_dict(*args, **keywords)
            freed = {home.full.untyped_storage()._cdata for home in self.homes if home.is_split}
            for name, each in whole.items():
                if isinstance(each, Tensor) and each.untyped_storage()._cdata in freed:
                    whole[name] = each.detach().clone()
            return whole

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        """Load a state dict of the module, the same on every rank. In stage 3 a collective.

        Raises:
            ValueError: With `assign`, which would replace the sharded parameters.
        """
        if keywords.get("assign"):
            raise ValueError("assign=True would replace the sharded parameters; load without it, or before wrapping")
        with self.gather_full(writes=True):
            return self.module.load_state_dict(state_dict, *args, **keywords)

    def named_parameters(self, *args: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by the module's own names, after waiting for those of stages 1 and 2."""
        self.synchronize()
        return super().named_parameters(*args, **keywords)

    @property
    def unused(self) -> frozenset[str]:
        """Names of the parameters that no rank used in the last step, if they are tracked."""
        return frozenset()

    def _keep_up(self) -> None:
        """Refuse parameters that were replaced after sharding, or became trainable or frozen."""
        with as_it_is():
            if learning(self.module) == self._learnt:
                return
        wrapped = {
            (id(each), home.dtype, home.device): name for home in self.homes if home.trains for name, each in home.named
        }
        now = {(id(each), each.dtype, each.device): name for name, each in self.trainable()}
        changed = sorted({(wrapped | now)[key] for key in wrapped.keys() ^ now.keys()})
        raise RuntimeError(
            f"{some_of(changed) or 'names or order of parameters'}: changed after the module was sharded; "
            "freeze, replace and convert parameters before wrapping, or take the module back with unwrap(), change it, "
            "and build the wrapper and its optimizer anew"
        )

    def _apply(self, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError(
            "a sharded module cannot be moved or converted: its parameters are views of flat tensors; "
            "call to(), half() and the like before wrapping"
        )

    def _tell(self, waits: bool) -> None:
        if self.on_wait is not None:
            self.on_wait(waits)

    def _wait_for(self, home: FlatParameters, wait: Wait) -> None:
        """Wait for a flat tensor to be gathered. The message of a timeout names it."""
        self._tell(True)
        try:
            with waiting_for(partial(self._entered, home), self.process_group):
                wait()
        finally:
            self._tell(False)

    def _entered(self, home: FlatParameters) -> Entered:
        """Describe what was waited for, after a failure."""
        place, count = next(n for n, each in enumerate(self.homes) if each is home), len(self.homes)
        launched = place + 1 if home.is_split else count
        names = home.names[0], home.names[-1]
        return Entered(self._spreads, place, count, launched, *names, home.full_bytes, what="flat parameters")

    def weakly(self) -> Callable[[FlatParameters, Wait], None]:
        """Return a wait function for hooks of the module, with only a weak reference to the wrapper."""
        me = weakref.ref(self)

        def wait_for(home: FlatParameters, wait: Wait) -> None:
            wait() if (alive := me()) is None else alive._wait_for(home, wait)

        return wait_for
