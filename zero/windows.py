"""When a unit's parameters are there: gathered before its modules run, one unit ahead, freed after.

    forward     gather  [root][1 ][2 ][3 ]                     each begins while the one before it computes
                compute       [1 ][2 ][3 ]
                free              1   2     -                  the last stays: the backward begins with it
    backward    gather            [2 ][1 ]
                compute       [3 ][2 ][1 ]
                free              3   2   1 root
                scatter           [3 ][2 ][1 ][root]           the gradients

Which unit follows which is what the forward before showed. A unit's backward begins with the gradient of what it has
returned. Autograd runs what was recorded last first: where a unit's backward begins, that of all units that ran after
it is over, and what has no gradient by then gets none. So on all ranks that run the same units in one order, whatever
parameters each uses of them, gathers and scatters come in one order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from muster.ddp.means import Wait
from muster.ddp.reducer import Reducer
from muster.zero.absent import as_it_is
from muster.zero.flat import FlatParameters
from muster.zero.gather import Gather
from muster.zero.gradients import Gradients
from muster.zero.order import SameOrder
from muster.zero.units import Unit
from muster.zero.whole import Hook, Presence, in_backward, other_thread

Waiting = Callable[[FlatParameters, Wait], None]  # waits, and tells who wants to know


class Window:
    """One unit's flat parameters, there or not."""

    def __init__(self, unit: Unit, homes: Sequence[FlatParameters], gather: Gather, waiting: Waiting) -> None:
        self.unit = unit
        self.homes = homes
        self.buckets: list[Gradients] = []
        self.is_whole = False
        self.is_running = False  # True: from the beginning of its first module to the end of its last
        self.run = 0  # which one of the forward it is in, or was last
        self._gather = gather
        self.wait_for = waiting
        self._under_way: list[tuple[FlatParameters, Wait]] = []

    def begin(self) -> None:
        """Start to gather, if nobody has."""
        if self.is_whole or self._under_way:
            return
        for home in self.homes:
            home.take_memory()
            self._under_way.append((home, self._gather.start(home, home.sent(), home.full)))

    def open(self) -> None:
        """Return when the parameters are there."""
        if self.is_whole:
            return
        self.begin()
        for home, wait in self._under_way:
            self.wait_for(home, wait)
            home.arrive()
        self._under_way.clear()
        self.is_whole = True

    def close(self) -> None:
        """Free them; those under way are waited for first."""
        if self._under_way:
            self.open()
        if self.is_whole:
            self.is_whole = False
            for home in self.homes:
                home.free()

    def lose(self) -> None:
        """Hear that nobody will gather them any more."""
        for home in self.homes:
            home.lose()


class Saved:
    """Hooks of saved tensors; `opens` makes a window's parameters whole, in a backward."""

    def __init__(self, windows: Sequence[Window], opens: Callable[[Window], None]) -> None:
        self._of = {home.full.untyped_storage()._cdata: window for window in windows for home in window.homes}
        self._opens = opens

    def pack(self, saved: Tensor) -> tuple[Tensor, int, Window | None]:
        """Note of which window a saved tensor is a part, and its version, which PyTorch leaves to hooks."""
        strided = saved.layout == torch.strided
        return saved, saved._version, self._of.get(saved.untyped_storage()._cdata) if strided else None

    def unpack(self, packed: tuple[Tensor, int, Window | None]) -> Tensor:
        """Return a saved tensor, there: a graph may leave its unit in ways that no hook on outputs sees.

        Raises:
            RuntimeError: it has been written to since, as parameters are by a step.
        """
        saved, version, window = packed
        if saved._version != version:
            what = (
                "a parameter was stepped"
                if window is not None
                else f"a tensor of shape {tuple(saved.shape)} was written to"
            )
            raise RuntimeError(
                f"{what} between its forward and its backward, which needs what it was: a variable needed for gradient "
                "computation has been modified by an inplace operation"
            )
        if window is not None:
            self._opens(window)
        return saved


Runs = list[Window]  # the units of one forward, in order


class Windows(Presence):
    """The windows of all units, the root's last, and the hooks that open and close them."""

    def __init__(self, module: nn.Module, windows: Sequence[Window], gather: Gather, *, reshard: bool) -> None:
        self.windows = windows
        self._gather = gather
        self.root = windows[-1]
        self.reshard = reshard
        self._reducer: Reducer[Gradients] | None = None
        self._inside, self._thread = 0, 0  # forwards of the wrapper that run now, and on which thread
        self._learning = 0  # forwards with gradients so far
        self._held_open = 0
        self._runs: Runs = []  # of this forward
        self._expected: Runs = []  # of the one before
        self._place = 0  # in it
        self._idle: list[Window] = []  # gathered ahead, or kept for the backward
        self._task = -1  # of autograd, the backward that runs now or ran last
        self._over: dict[int, Runs] = {}  # windows, by identity, whose backward is over, in which forward's graph
        self._unsettled: list[Window] = []  # of those, whose gradients are not launched yet
        self._order = SameOrder(gather.group, next(home.device for each in windows for home in each.homes))
        self._handles = []
        self._saved = Saved(windows, self._open_in_backward)
        for window in windows[:-1]:
            begins = Hook(partial(self._begins, window))
            for each in window.unit.modules:
                ends = Hook(partial(self._ends, window, each is window.unit.modules[-1]))
                self._handles += [
                    each.register_forward_pre_hook(begins, prepend=True),
                    each.register_forward_hook(ends),
                ]

    def launch_with(self, reducer: Reducer[Gradients]) -> None:
        """Tell a reducer, whose buckets are of these windows, when a unit's gradients are all there."""
        self._reducer = reducer
        for window in self.windows:
            homes = {id(home) for home in window.homes}
            window.buckets = [bucket for bucket in reducer.buckets if id(bucket.home) in homes]

    def remove(self) -> None:
        """Take the hooks away. Parameters stay where they are, and say so."""
        for handle in self._handles:
            handle.remove()
        for window in self.windows:
            window.lose()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Let units open and close within it, as a forward of the wrapper does."""
        if in_backward():  # all of it is forwarded again
            yield
            return
        self._start()
        self._inside, self._thread = self._inside + 1, get_ident()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack):
                yield
        except BaseException:
            self._inside -= 1
            self.close()
            raise
        self._inside -= 1
        self._learn()
        if not torch.is_grad_enabled():
            self.close()
            self._gather.meet()

    @contextmanager
    def all_open(self) -> Iterator[None]:
        self._begin("gather_full() or a state dict")
        self._held_open += 1
        try:
            for window in self.windows:
                window.begin()
            for window in self.windows:
                window.open()
            self._gather.meet()
            yield
        finally:
            self._held_open -= 1
            self.close()

    def close(self) -> None:
        """Free all that nobody holds open."""
        if not (self._held_open or self._inside):
            for window in self.windows:
                window.close()

    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Free what was gathered before a step: it is old now. Graphs made before it are refused."""
        for home in homes:
            home.outdate()
        self._gather.written()
        for window in self.windows:
            window.close()
        if self._held_open:
            for window in self.windows:
                window.open()

    def synchronize(self) -> None:
        """Check, before a step, that all ranks have run the same units.

        Raises:
            RuntimeError: they have not.
        """
        self._order.require(lambda: ", ".join(each.unit.name for each in self._expected))

    def _begin(self, what: str) -> None:
        first = next(each for each in self.windows if each.homes)
        self._order.begin(what, partial(first.wait_for, first.homes[0]))

    # The forward ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin with the root unit, and with the first unit of the forward before."""
        learns = torch.is_grad_enabled()
        self._learning += learns
        self._begin(f"forward {self._learning} with gradients" if learns else "a forward without gradients")
        self._runs, self._place, self._idle = [], 0, self._expected[:1]
        self.root.begin()
        for window in self.windows[:-1]:
            window.is_running = False
            if self.reshard and not self._held_open and window not in self._idle:
                window.close()  # left by a forward without a backward, or by one that failed
        for window in self._idle:
            window.begin()
        self.root.open()

    def _begins(self, window: Window, module: nn.Module, inputs: Any) -> None:
        """Open a unit before one of its modules runs, and begin with the next."""
        if in_backward():  # forwarded again, of a checkpoint
            self._enter_backward()
        elif self._inside and get_ident() != self._thread:
            raise other_thread(window.unit.name)
        elif self._inside and not window.is_running:
            window.is_running = True
            window.run = len(self._runs)
            self._runs.append(window)
            ahead = self._next(window)
            for each in self._idle:
                if each is not window and each is not ahead and self.reshard and not self._held_open:
                    each.close()  # another unit runs than before
            window.open()
            self._idle = [] if ahead is None or ahead is window else [ahead]
            for each in self._idle:
                each.begin()
        elif not (self._inside or self._held_open):
            raise RuntimeError(
                f"{window.unit.name}: used outside the forward of its ShardedDataParallel, where it has no parameters; "
                "call the wrapper, or use it within gather_full()"
            )
        window.open()

    def _next(self, window: Window) -> Window | None:
        """Find a unit in the forward before, from where this one is; return the one that followed."""
        expected, place = self._expected, self._place
        if window in expected[place:]:
            self._place = expected.index(window, place) + 1
        return expected[self._place] if self._place < len(expected) else None

    def _ends(self, window: Window, is_last: bool, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Prepare the backward of what a unit has returned; after its last module, free it."""
        if not self._inside or in_backward():
            return
        learns = torch.is_grad_enabled()
        if learns:
            self._prepare_backward(window, outputs)
        if not is_last:
            return
        window.is_running = False
        if self._held_open or (learns and not self.reshard):
            return
        following = self._expected[self._place : self._place + 1]
        if window in following or (learns and self._expected and not following):
            self._idle.append(window)  # it runs again at once, or its backward comes first
            return
        window.close()
        if torch.is_autocast_enabled(window.homes[0].device.type):
            torch.clear_autocast_cache()  # whole parameters in 16 bits

    def _prepare_backward(self, window: Window, outputs: Any) -> None:
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        if not tensors:
            raise RuntimeError(
                f"{window.unit.name}: returns a {type(outputs).__name__} without a tensor in it that can be found; "
                "let units return tensors, or tuples, lists and dictionaries of them"
            )
        begins = partial(self._backward_begins, window, self._runs, window.run, len(self._runs))
        for each in tensors:
            if each.grad_fn is not None:
                each.register_hook(begins)  # type: ignore[no-untyped-call]

    def _learn(self) -> None:
        """Remember in which order the units have run; in the reverse order gradients are launched."""
        if torch.is_grad_enabled() and self._reducer is not None and self._runs != self._expected:
            first = {id(window): -place for place, window in reversed(list(enumerate(self._runs)))}
            first[id(self.root)] = 2
            order = {id(each): first.get(id(window), 1) for window in self.windows for each in window.buckets}
            self._reducer.reorder(lambda bucket: order[id(bucket)])
        self._expected = self._runs
        if torch.is_grad_enabled():
            self._order.ask([self.windows.index(each) for each in self._runs])

    # The backward ---------------------------------------------------------------------------------------------------

    def _open_in_backward(self, window: Window) -> None:
        self._enter_backward()
        window.open()

    def _enter_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._over, self._unsettled = task, {}, []
            Variable._execution_engine.queue_callback(self._backward_ends)
        self.root.open()

    def _backward_begins(self, window: Window, runs: Runs, run: int, end: int, gradient: Tensor) -> None:
        """Free the units after one, launch their gradients; open this one, and begin with the one before.

        It was number `run` of the forward, and number `end` began after it had ended.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{window.unit.name}: a backward with create_graph=True, whose own backward would need parameters that "
                "are freed; keep them whole with stage=2"
            )
        self._enter_backward()
        if self._over.get(id(window)) is runs:  # what it returned is an input of its own
            return
        with as_it_is():
            for place in range(end, len(runs)):
                if self._over.get(id(runs[place])) is runs:
                    break
                if runs[place] not in runs[:end]:
                    self._is_over(runs[place], runs)
            self._launch(window if run == 0 else None)
        window.open()
        if run:
            runs[run - 1].begin()

    def _is_over(self, window: Window, runs: Runs) -> None:
        self._over[id(window)] = runs
        self._unsettled.append(window)
        if not self._held_open:
            window.close()

    def _launch(self, first: Window | None) -> None:
        """Launch the gradients of units whose backward is over; those of the first one when they have come."""
        if self._reducer is not None:
            if first is not None:
                self._reducer.release(first.buckets, are_over=False)
            self._unsettled = [each for each in self._unsettled if not self._reducer.release(each.buckets)]

    def _backward_ends(self) -> None:
        if not in_backward():  # a reentrant checkpoint has backwards of its own
            self._task = -1
            self.close()
