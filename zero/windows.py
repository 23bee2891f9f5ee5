"""When a unit's parameters are there: gathered before its modules run, one unit ahead, freed after.

    forward     gather  [root][1 ][2 ][3 ]                     each begins while the one before it computes
                compute       [1 ][2 ][3 ]
                free              1   2     -                  the last stays: the backward begins with it
    backward    gather            [2 ][1 ]
                compute       [3 ][2 ][1 ]
                free              3   2   1 root               each when its last gradient is there

Which unit follows which is what the forward before showed. A unit's backward begins with the gradient of its output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ddp.means import Wait
from zero.flat import FlatParameters
from zero.gather import Gather
from zero.presence import Presence
from zero.units import Unit

Waiting = Callable[[FlatParameters, Wait], None]  # waits, and tells who wants to know


class Window:
    """One unit's flat parameters, there or not."""

    def __init__(self, unit: Unit, homes: Sequence[FlatParameters], gather: Gather, waiting: Waiting) -> None:
        self.unit = unit
        self.homes = homes
        self.has_frozen = any(not each.trains for each in homes)
        self.learns = sum(each.trains for each in homes)
        self.is_whole = False
        self._gather = gather
        self._waiting = waiting
        self._under_way: list[tuple[FlatParameters, Wait]] = []
        self._used_up = 0

    def begin(self) -> None:
        """Start to gather, if nobody has."""
        if self.is_whole or self._under_way:
            return
        for home in self.homes:
            home.take_memory()
            self._under_way.append((home, self._gather.start(home, home.shard, home.full)))

    def open(self) -> None:
        """Return when the parameters are there."""
        if self.is_whole:
            return
        self.begin()
        for home, wait in self._under_way:
            self._waiting(home, wait)
            home.is_whole = True
        self._under_way.clear()
        self.is_whole = True

    def close(self) -> None:
        """Free them; those under way are waited for first."""
        if self._under_way:
            self.open()
        self._used_up = 0
        if self.is_whole:
            self.is_whole = False
            for home in self.homes:
                home.free()

    def used_up(self) -> bool:
        """Hear that all gradients of one flat tensor are there; True when those of all are."""
        self._used_up += 1
        return self._used_up >= self.learns


class Windows(Presence):
    """The windows of all units, the root's last, and the hooks that open and close them."""

    def __init__(self, module: nn.Module, windows: Sequence[Window], *, reshard: bool) -> None:
        self.windows = windows
        self.root = windows[-1]
        self.reshard = reshard
        self._inside = 0  # forwards of the wrapper that run now
        self._held_open = 0
        self._in_backward = False
        self._pass: list[Window] = []  # of this forward, in order
        self._after: dict[int, Window] = {}  # what followed a window in the forward before
        self._before: dict[int, Window] = {}
        self._last: Window | None = None
        for window in windows[:-1]:
            modules = window.unit.modules
            for each in modules:
                each.register_forward_pre_hook(partial(self._begins, window), prepend=True)
            modules[-1].register_forward_hook(partial(self._ends, window), always_call=False)
        owner = {id(each): window for window in windows for _, each in window.unit.parameters}
        for name, part in module.named_modules():
            needed = {id(owner[id(each)]): owner[id(each)] for each in part.parameters(recurse=False)}
            if needed:
                part.register_forward_pre_hook(partial(_require_open, name or "the module", list(needed.values())))
        module.register_state_dict_pre_hook(self._require_all)  # type: ignore[no-untyped-call]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Let units open and close within it, as a forward of the wrapper does."""
        self._pass = []
        self._inside += 1
        self.root.open()
        if self._after and (first := self._after.get(id(self.root))) is not None:
            first.begin()
        try:
            yield
        finally:
            self._inside -= 1
        self._learn()
        if not torch.is_grad_enabled():
            self.close()

    @contextmanager
    def all_open(self) -> Iterator[None]:
        """Hold all parameters, whole, within it."""
        self._held_open += 1
        for window in self.windows:
            window.begin()
        for window in self.windows:
            window.open()
        try:
            yield
        finally:
            self._held_open -= 1
            self.close()

    def close(self) -> None:
        """Free all that nobody holds open."""
        if not self._held_open:
            for window in self.windows:
                window.close()

    def of(self, home: FlatParameters) -> Window:
        """Return the window that a flat tensor belongs to."""
        return next(window for window in self.windows if any(each is home for each in window.homes))

    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Free what was gathered before a step: it is old now."""
        held, self._held_open = self._held_open, 0
        self.close()
        self._held_open = held
        if held:
            for window in self.windows:
                window.open()

    def synchronize(self) -> None:
        """Do nothing: nothing is under way outside a forward or backward."""

    def used_up(self, window: Window) -> None:
        """Hear that a unit's backward has made all gradients of one of its flat tensors."""
        if window.used_up() and window is not self.root and not window.has_frozen and not self._held_open:
            window.close()

    def _begins(self, window: Window, module: nn.Module, inputs: Any) -> None:
        """Open a unit before one of its modules runs, and begin with the next."""
        if not (self._inside or self._in_backward or self._held_open):
            raise RuntimeError(
                f"{window.unit.name}: used outside the forward of its ShardedDataParallel, where it has no parameters; "
                "call the wrapper, or use it within gather_full()"
            )
        window.open()
        if self._in_backward:  # forwarded again, of a checkpoint
            return
        if not self._pass or self._pass[-1] is not window:
            self._pass.append(window)
        if (following := self._after.get(id(window))) is not None:
            following.begin()

    def _ends(self, window: Window, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Prepare a unit's backward, and free it."""
        if self._in_backward:
            return
        if torch.is_grad_enabled():
            tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
            if not tensors:
                raise RuntimeError(
                    f"{window.unit.name}: returns a {type(outputs).__name__} without a tensor in it that can be found; "
                    "let units return tensors, or tuples, lists and dictionaries of them"
                )
            for each in tensors:
                if each.requires_grad:
                    each.register_hook(partial(self._backward_begins, window))  # type: ignore[no-untyped-call]
            if not self.reshard or window is self._last:
                return
        if not self._held_open:
            window.close()

    def _backward_begins(self, window: Window, gradient: Tensor) -> None:
        """Open a unit for its backward, and begin with the one before."""
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ends)
            self.root.open()
        window.open()
        if (before := self._before.get(id(window))) is not None:
            before.begin()
        following = self._after.get(id(window))
        if following is not None and following.has_frozen and not self._held_open:
            following.close()  # its backward is over, for that made this gradient

    def _backward_ends(self) -> None:
        self._in_backward = False
        self.close()

    def _learn(self) -> None:
        """Remember in which order the units have run."""
        if not self._pass:
            return
        chain = [self.root, *self._pass]
        self._after = {id(each): following for each, following in pairwise(chain)}
        self._before = {id(b): a for a, b in pairwise(self._pass)}
        self._last = self._pass[-1]

    def _require_all(self, *_: Any) -> None:
        if not all(window.is_whole for window in self.windows):
            raise RuntimeError(
                "this module's parameters are sharded; call state_dict() of its ShardedDataParallel, on every rank, "
                "or take it within gather_full()"
            )


def _require_open(name: str, windows: Sequence[Window], module: nn.Module, inputs: Any) -> None:
    """Refuse to run a module whose parameters are not there."""
    for window in windows:
        if not window.is_whole:
            raise RuntimeError(
                f"{name}: runs while the parameters of {window.unit.name} are not gathered; call the wrapper and not a "
                "part of it, name what runs by itself as a unit, or use gather_full()"
            )
