"""What a module whose parameters, or their optimizer's state, are held in shards can do, whatever the stage."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddp.base import DataParallel, learning
from ddp.checks import NAMED_AT_MOST
from ddp.means import Wait
from ddp.timeouts import Entered, waiting_for
from zero.flat import FlatParameters, Held
from zero.gather import Gather, gather_now
from zero.optimizer import ShardedOptimizer
from zero.presence import Presence
from zero.sources import Joined


class Sharded(DataParallel):
    """A module in flat tensors, `homes`, of which each rank answers for its shard.

    `presence` knows when parameters are whole. `on_wait` hears True before and False after every wait in a step.
    """

    homes: Sequence[FlatParameters]
    presence: Presence
    gather: Gather
    on_wait: Callable[[bool], None] | None = None

    def optimizer(
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        params_or_groups: Iterable[Any] | None = None,
        *,
        masters: bool = True,
        **kwargs: Any,
    ) -> ShardedOptimizer:
        """Build an optimizer of this rank's shards; by default of all parameters that learn.

        Raises:
            ValueError: it needs whole tensors, or a parameter is not the wrapped module's.
        """
        given = [each for _, each in self.trainable()] if params_or_groups is None else params_or_groups
        return ShardedOptimizer(given, optimizer_cls, masters=masters, source=Joined(self), **kwargs)

    def synchronize(self) -> None:
        """Wait for parameters that are being gathered after a step (stages 1 and 2)."""
        self.presence.synchronize()

    @contextmanager
    def gather_full(self, *, writes: bool = False) -> Iterator[nn.Module]:
        """Hold all parameters whole on every rank, for evaluation or export: a collective.

        With `writes`, what has been written to the parameters within, the same on all ranks, is kept.
        """
        with self.presence.all_open():
            yield self.module
            if writes:
                for home in self.homes:
                    home.adopt()

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the mean gradients, whole, of the parameters that have one: a collective."""
        unused = self.unused
        whole: dict[str, Tensor] = {}
        for home in self.homes:
            if home.grad is None:
                continue
            views = home.views_of(gather_now(self.gather, home, home.grad))
            whole |= {name: view for name, view in zip(home.names, views, strict=True) if name not in unused}
        return whole

    def held_parameters(self) -> list[Held]:
        """List the ranges of all parameters that this rank answers for; after filling them, call `refresh`."""
        self.synchronize()
        return [each for home in self.homes for each in home.held()]

    def refresh(self, *, masters: bool = False) -> None:
        """Make parameters what their shards hold: a collective. With `masters`, what the masters hold, rounded."""
        for home in self.homes:
            if masters:
                home.write_back()
            elif home.has_masters():
                home.stepped.copy_(home.shard)
        self.presence.spread(self.homes)
        self.synchronize()

    def spread(self) -> None:
        """Let the parameters follow their shards after a step."""
        homes = [home for home in self.homes if home.trains]
        for home in homes:
            home.write_back()
        self.presence.spread(homes)

    def forget_gradients(self) -> None:
        """Drop the shards of gradients, and virtual shards."""
        for home in self.homes:
            home.grad = None
        self._forget_shards()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, whole ones and shards."""
        self.forget_gradients()
        super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """Return the module's own state dict, whole; in stage 3 a collective, of copies."""
        with self.gather_full():
            whole = self.module.state_dict(*args, **keywords)
            if all(home.is_whole and not home.is_split for home in self.homes):
                return whole
            return type(whole)(
                (name, each.clone() if isinstance(each, Tensor) else each) for name, each in whole.items()
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        """Load a state dict of the module, the same on every rank; in stage 3 a collective."""
        with self.gather_full(writes=True):
            return self.module.load_state_dict(state_dict, *args, **keywords)

    @property
    def unused(self) -> frozenset[str]:
        """Names of the parameters that no rank has used in the last step, where that is asked."""
        return frozenset()

    def _keep_up(self) -> None:
        """Refuse parameters that are others than when they were sharded, or learn now and did not then."""
        if learning(self.module) == self._learnt:
            return
        wrapped = {
            id(each): name
            for home in self.homes
            if home.trains
            for name, each in zip(home.names, home.parameters, strict=True)
        }
        now = {id(each): name for name, each in self.trainable()}
        changed = sorted(
            {wrapped[key] for key in wrapped.keys() - now.keys()} | {now[key] for key in now.keys() - wrapped.keys()}
        )
        what = ", ".join(changed[:NAMED_AT_MOST]) or "a parameter's type or device"
        raise RuntimeError(
            f"{what}: changed after the module was sharded; freeze, replace and convert parameters before wrapping, "
            "or build the wrapper and its optimizer anew"
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
        """Wait for flat parameters to be whole; a time-out names them."""
        self._tell(True)
        entered = Entered(0, self.homes.index(home), len(self.homes), 0, home.names[0], home.names[-1], home.full_bytes)
        with waiting_for(entered, self.process_group):
            wait()
        self._tell(False)
