"""Unit states in stage 3: gather a unit's parameters before its modules run, one unit ahead, and free them after.

    forward     gather  [root][1 ][2 ][3 ]                     each begins while the previous unit computes
                compute       [1 ][2 ][3 ]
                free              1   2     -                  the last one stays: the backward begins with it
    backward    gather            [2 ][1 ]
                compute       [3 ][2 ][1 ]
                free              3   2   1 root
                scatter           [3 ][2 ][1 ][root]           the gradients

The previous forward shows which unit follows which. A unit's backward begins with the gradient of its outputs. Autograd
runs the operations recorded last first. So when a unit's backward begins, that of all later units is over, and any of
their parameters without a gradient by then gets none. Therefore gathers and scatters have the same order on all ranks
that run the same units in the same order, whichever parameters of a unit each of them uses.
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

Waiting = Callable[[FlatParameters, Wait], None]  # waits, and notifies observers of the wait


class Window:
    """The flat parameters of one unit, gathered or freed."""

    def __init__(self, unit: Unit, homes: Sequence[FlatParameters], gather: Gather, waiting: Waiting) -> None:
        self.unit = unit
        self.homes = homes
        self.buckets: list[Gradients] = []
        self.is_whole = False
        self.is_running = False  # True: from the start of its first module to the end of its last
        self.run = 0  # its position in the current or last forward
        self._gather = gather
        self.wait_for = waiting
        self._under_way: list[tuple[FlatParameters, Wait]] = []

    def begin(self) -> None:
        """Begin to gather, unless already begun."""
        if self.is_whole or self._under_way:
            return
        for home in self.homes:
            home.take_memory()
            self._under_way.append((home, self._gather.start(home, home.sent(), home.full)))

    def open(self) -> None:
        """Wait until the parameters are gathered."""
        if self.is_whole:
            return
        self.begin()
        for home, wait in self._under_way:
            self.wait_for(home, wait)
            home.arrive()
        self._under_way.clear()
        self.is_whole = True

    def close(self) -> None:
        """Free the parameters, after waiting for a gather in progress."""
        if self._under_way:
            self.open()
        if self.is_whole:
            self.is_whole = False
            for home in self.homes:
                home.free()

    def lose(self) -> None:
        """Mark the parameters as lost: they will never be gathered again."""
        for home in self.homes:
            home.lose()


class Saved:
    """Hooks of saved tensors. In a backward, `opens` gathers a unit's parameters when one of them is unpacked."""

    def __init__(self, windows: Sequence[Window], opens: Callable[[Window], None]) -> None:
        self._of = {home.full.untyped_storage()._cdata: window for window in windows for home in window.homes}
        self._opens = opens

    def pack(self, saved: Tensor) -> tuple[Tensor, int, Window | None]:
        """Save a tensor with its version, which PyTorch leaves to hooks, and the unit it belongs to, if any."""
        strided = saved.layout == torch.strided
        return saved, saved._version, self._of.get(saved.untyped_storage()._cdata) if strided else None

    def unpack(self, packed: tuple[Tensor, int, Window | None]) -> Tensor:
        """Return a saved tensor, gathered: a graph may leave its unit in ways that hooks on outputs do not see.

        Raises:
            RuntimeError: If it was written to since, for example a parameter by a step.
        """
        saved, version, window = packed
        if saved._version != version:
            what = (
                "a parameter was stepped"
                if window is not None
                else f"a tensor of shape {tuple(saved.shape)} was written to"
            )
            raise RuntimeError(
                f"{what} between its forward and its backward, which needs its old value: a variable needed for "
                "gradient computation has been modified by an inplace operation"
            )
        if window is not None:
            self._opens(window)
        return saved


Runs = list[Window]  # the units of one forward, in order


class Windows(Presence):
    """The states of all units, the root's last, and the hooks that open (gather) and close (free) them."""

    def __init__(self, module: nn.Module, windows: Sequence[Window], gather: Gather, *, reshard: bool) -> None:
        self.windows = windows
        self._gather = gather
        self.root = windows[-1]
        self.reshard = reshard
        self._reducer: Reducer[Gradients] | None = None
        self._inside, self._thread = 0, 0  # the number of running forwards of the wrapper, and their thread
        self._learning = 0  # number of forwards with gradients so far
        self._held_open = 0
        self._runs: Runs = []  # of this forward
        self._expected: Runs = []  # of the previous forward
        self._place = 0  # the position in `_expected`
        self._idle: list[Window] = []  # gathered ahead, or kept for the backward
        self._task = -1  # autograd's id of the running or last backward
        self._over: dict[int, Runs] = {}  # by window id: the forward whose backward has passed the window
        self._unsettled: list[Window] = []  # windows of `_over` with gradients that are not launched yet
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
        """Set the reducer that is notified when all gradients of a unit have arrived."""
        self._reducer = reducer
        for window in self.windows:
            homes = {id(home) for home in window.homes}
            window.buckets = [bucket for bucket in reducer.buckets if id(bucket.home) in homes]

    def remove(self) -> None:
        """Remove the hooks. Parameters stay sharded, and refuse to be used."""
        for handle in self._handles:
            handle.remove()
        for window in self.windows:
            window.lose()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Open and close units within the block, which is one forward of the wrapper."""
        if in_backward():  # a checkpoint runs the whole forward again
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
        """Free all units that are not held open."""
        if not (self._held_open or self._inside):
            for window in self.windows:
                window.close()

    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Free units gathered before a step, because they are outdated, and invalidate graphs made before it."""
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
            RuntimeError: If they have not.
        """
        self._order.require(lambda: ", ".join(each.unit.name for each in self._expected))

    def _begin(self, what: str) -> None:
        first = next(each for each in self.windows if each.homes)
        self._order.begin(what, partial(first.wait_for, first.homes[0]))

    # The forward ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin to gather the root unit, and the first unit of the previous forward."""
        learns = torch.is_grad_enabled()
        self._learning += learns
        self._begin(f"forward {self._learning} with gradients" if learns else "a forward without gradients")
        self._runs, self._place, self._idle = [], 0, self._expected[:1]
        self.root.begin()
        for window in self.windows[:-1]:
            window.is_running = False
            if self.reshard and not self._held_open and window not in self._idle:
                window.close()  # left open by a forward that had no backward, or failed
        for window in self._idle:
            window.begin()
        self.root.open()

    def _begins(self, window: Window, module: nn.Module, inputs: Any) -> None:
        """Open a unit before one of its modules runs, and begin to gather the next one."""
        if in_backward():  # a checkpoint runs this forward again
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
                    each.close()  # the order of units has changed
            window.open()
            self._idle = [] if ahead is None or ahead is window else [ahead]
            for each in self._idle:
                each.begin()
        elif not (self._inside or self._held_open):
            raise RuntimeError(
                f"{window.unit.name}: used outside the forward of its ShardedDataParallel, where it has no parameters; "
                "call the wrapper, or use the module within gather_full()"
            )
        window.open()

    def _next(self, window: Window) -> Window | None:
        """Find this unit in the previous forward, from the current position on; return the unit that followed it."""
        expected, place = self._expected, self._place
        if window in expected[place:]:
            self._place = expected.index(window, place) + 1
        return expected[self._place] if self._place < len(expected) else None

    def _ends(self, window: Window, is_last: bool, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Hook the outputs of a unit to detect its backward; free it after its last module."""
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
            self._idle.append(window)  # it runs again next, or its backward comes first
            return
        window.close()
        if torch.is_autocast_enabled(window.homes[0].device.type):
            torch.clear_autocast_cache()  # it contains 16-bit copies of whole parameters

    def _prepare_backward(self, window: Window, outputs: Any) -> None:
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        if not tensors:
            raise RuntimeError(
                f"{window.unit.name}: returns a {type(outputs).__name__} in which no tensor can be found; "
                "let units return tensors, or tuples, lists and dictionaries of them"
            )
        begins = partial(self._backward_begins, window, self._runs, window.run, len(self._runs))
        for each in tensors:
            if each.grad_fn is not None:
                each.register_hook(begins)  # type: ignore[no-untyped-call]

    def _learn(self) -> None:
        """Remember the order in which units ran. Gradients are launched in the reverse order."""
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
        """Free later units and launch their gradients; open this unit, and begin to gather the one before it.

        This unit was at position `run` of the forward. Units from position `end` on began after it had ended.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{window.unit.name}: a backward with create_graph=True needs the parameters in its own backward, but "
                "they are freed; keep them whole with stage=2"
            )
        self._enter_backward()
        if self._over.get(id(window)) is runs:  # one of its outputs is also its input
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
        """Launch the gradients of units whose backward is over, and those of `first` when they have arrived."""
        if self._reducer is not None:
            if first is not None:
                self._reducer.release(first.buckets, are_over=False)
            self._unsettled = [each for each in self._unsettled if not self._reducer.release(each.buckets)]

    def _backward_ends(self) -> None:
        if not in_backward():  # a reentrant checkpoint runs nested backwards
            self._task = -1
            self.close()
