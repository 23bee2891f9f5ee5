"""Unit states in stage 3: gather a unit's parameters one unit before its modules run, and free them afterwards.

    forward     gather  [root][1 ][2 ][3 ]                     a gather begins while the previous unit computes
                compute       [1 ][2 ][3 ]
                free              1   2     -                  the last unit stays: the backward begins with it
    backward    gather            [2 ][1 ]
                compute       [3 ][2 ][1 ]
                free              3   2   1 root
                scatter           [3 ][2 ][1 ][root]           the gradients

Units are expected to run in the same order as in the previous forward. A unit's backward begins with the gradient of
its outputs. Autograd runs operations in the reverse order of their recording. So when the backward of a unit begins,
the backward of all later units is over, and their parameters get no more gradients. Therefore ranks that run the same
units in the same order also gather and scatter in the same order, even if they use different parameters of a unit.
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
from torch.utils.hooks import RemovableHandle

from muster.ddp.compiler import outside
from muster.ddp.means import Wait
from muster.ddp.reducer import Reducer
from muster.zero.absent import as_it_is
from muster.zero.flat import FlatParameters
from muster.zero.gather import Gather
from muster.zero.gradients import Gradients
from muster.zero.hooks import Around, OutsideHook, around, within_compiled
from muster.zero.order import SameOrder
from muster.zero.units import Unit
from muster.zero.whole import Residency, in_backward, other_thread

Waiting = Callable[[FlatParameters, Wait], None]  # waits, and notifies observers of the wait


class UnitState:
    """The flat parameters of one unit, gathered or freed."""

    def __init__(self, unit: Unit, flat_parameters: Sequence[FlatParameters], gather: Gather, waiting: Waiting) -> None:
        self.unit = unit
        self.flat_parameters = flat_parameters
        self.buckets: list[Gradients] = []
        self.is_whole = False
        self.is_running = False  # True: from the start of its first module to the end of its last module
        self.run = 0  # the unit's position in the current or last forward
        self._gather = gather
        self.wait_for = waiting
        self._under_way: list[tuple[FlatParameters, Wait]] = []

    def begin(self) -> None:
        """Begin to gather the parameters, unless this has already begun."""
        if self.is_whole or self._under_way:
            return
        for flat_parameter in self.flat_parameters:
            flat_parameter.take_memory()
            self._under_way.append(
                (flat_parameter, self._gather.start(flat_parameter, flat_parameter.sent(), flat_parameter.full))
            )

    def open(self) -> None:
        """Wait until the parameters are gathered."""
        if self.is_whole:
            return
        self.begin()
        for flat_parameter, wait in self._under_way:
            self.wait_for(flat_parameter, wait)
            flat_parameter.arrive()
        self._under_way.clear()
        self.is_whole = True

    def close(self) -> None:
        """Free the parameters, after waiting for a gather in progress."""
        if self._under_way:
            self.open()
        if self.is_whole:
            self.is_whole = False
            for flat_parameter in self.flat_parameters:
                flat_parameter.free()

    def lose(self) -> None:
        """Mark the parameters as lost: they will never be gathered again."""
        for flat_parameter in self.flat_parameters:
            flat_parameter.lose()


class SavedTensorHooks:
    """Hooks for tensors that autograd saves. `opens` gathers a unit when the backward reads one of its parameters."""

    def __init__(self, unit_states: Sequence[UnitState], opens: Callable[[UnitState], None]) -> None:
        self._of = {
            flat_parameter.full.untyped_storage()._cdata: unit_state
            for unit_state in unit_states
            for flat_parameter in unit_state.flat_parameters
        }
        self._opens = opens

    def pack(self, saved: Tensor) -> tuple[Tensor, int, UnitState | None]:
        """Save a tensor with its unit, if it has one, and its version, which PyTorch does not check with hooks."""
        strided = saved.layout == torch.strided
        return saved, saved._version, self._of.get(saved.untyped_storage()._cdata) if strided else None

    def unpack(self, packed: tuple[Tensor, int, UnitState | None]) -> Tensor:
        """Return a saved tensor. If it is a parameter, gather its unit first, because output hooks do not detect every
        backward.

        Raises:
            RuntimeError: If the tensor was written to since it was saved, for example by a step.
        """
        saved, version, unit_state = packed
        if saved._version != version:
            what = (
                "a parameter was stepped"
                if unit_state is not None
                else f"a tensor of shape {tuple(saved.shape)} was written to"
            )
            raise RuntimeError(
                f"{what} between its forward and its backward, which needs its old value: a variable needed for "
                "gradient computation has been modified by an inplace operation"
            )
        if unit_state is not None:
            self._opens(unit_state)
        return saved


Runs = list[UnitState]  # the units of one forward, in order


class UnitStates(Residency):
    """The states of all units, with the root unit last, and the hooks that open (gather) and close (free) units."""

    def __init__(self, module: nn.Module, unit_states: Sequence[UnitState], gather: Gather, *, reshard: bool) -> None:
        self.unit_states = unit_states
        self._gather = gather
        self.root = unit_states[-1]
        self.reshard = reshard
        self._reducer: Reducer[Gradients] | None = None
        self._inside, self._thread = 0, 0  # number of running forwards of the wrapper, and the thread that runs them
        self._forwards = 0  # number of forwards with gradients so far
        self._held_open = 0
        self._runs: Runs = []  # units of this forward
        self._expected: Runs = []  # units of the previous forward
        self._place = 0  # current position in `_expected`
        self._idle: list[UnitState] = []  # units gathered ahead, or kept for the backward
        self._task = -1  # autograd's id of the running or last backward
        # The forward for which the backward of a unit is over, by id of the unit state.
        self._over: dict[int, Runs] = {}
        self._unsettled: list[UnitState] = []  # unit states in `_over` whose gradients are not launched yet
        self._order = SameOrder(
            gather.group, next(flat_parameter.device for each in unit_states for flat_parameter in each.flat_parameters)
        )
        self._handles: list[RemovableHandle | Around] = []
        self._saved = SavedTensorHooks(unit_states, self._open_in_backward)
        within = within_compiled(module)
        for unit_state in unit_states[:-1]:
            begins = partial(self._begins, unit_state)
            for each in unit_state.unit.modules:
                ends = partial(self._ends, unit_state, each is unit_state.unit.modules[-1])
                self._handles += around(each, begins, ends, kind=OutsideHook, is_within=id(each) in within)

    def launch_with(self, reducer: Reducer[Gradients]) -> None:
        """Set the reducer whose buckets are released when the backward of their unit is over."""
        self._reducer = reducer
        for unit_state in self.unit_states:
            flat_parameters = {id(flat_parameter) for flat_parameter in unit_state.flat_parameters}
            unit_state.buckets = [bucket for bucket in reducer.buckets if id(bucket.flat_parameter) in flat_parameters]

    def remove(self) -> None:
        """Remove the hooks. Parameters stay sharded, and using them raises an error."""
        for handle in self._handles:
            handle.remove()
        for unit_state in self.unit_states:
            unit_state.lose()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Open and close units within the block, which is one forward of the wrapper."""
        if in_backward():  # activation checkpointing recomputes the whole forward
            yield
            return
        outside(self._start)
        self._inside, self._thread = self._inside + 1, get_ident()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack):
                yield
        except BaseException:
            self._inside -= 1
            outside(self.close)
            raise
        self._inside -= 1
        outside(self._record_order)
        if not torch.is_grad_enabled():
            outside(self.close)
            outside(self._gather.meet)

    @contextmanager
    def all_open(self) -> Iterator[None]:
        self._begin("gather_full() or a state dict")
        self._held_open += 1
        try:
            for unit_state in self.unit_states:
                unit_state.begin()
            for unit_state in self.unit_states:
                unit_state.open()
            self._gather.meet()
            yield
        finally:
            self._held_open -= 1
            self.close()

    def close(self) -> None:
        """Free all units that are not held open."""
        if not (self._held_open or self._inside):
            for unit_state in self.unit_states:
                unit_state.close()

    def spread(self, flat_parameters: Sequence[FlatParameters]) -> None:
        """Free units that were gathered before a step, and invalidate earlier graphs, because both are outdated."""
        for flat_parameter in flat_parameters:
            flat_parameter.outdate()
        self._gather.written()
        for unit_state in self.unit_states:
            unit_state.close()
        if self._held_open:
            for unit_state in self.unit_states:
                unit_state.open()

    def synchronize(self) -> None:
        """Check, before a step, that all ranks have run the same units.

        Raises:
            RuntimeError: If units or their order differ.
        """
        self._order.require(lambda: ", ".join(each.unit.name for each in self._expected))

    def _begin(self, what: str) -> None:
        first = next(each for each in self.unit_states if each.flat_parameters)
        self._order.begin(what, partial(first.wait_for, first.flat_parameters[0]))

    # The forward ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Gather the root unit, and begin to gather the unit that ran first in the previous forward."""
        with_gradients = torch.is_grad_enabled()
        self._forwards += with_gradients
        self._begin(f"forward {self._forwards} with gradients" if with_gradients else "a forward without gradients")
        self._runs, self._place, self._idle = [], 0, self._expected[:1]
        self.root.begin()
        for unit_state in self.unit_states[:-1]:
            unit_state.is_running = False
            if self.reshard and not self._held_open and unit_state not in self._idle:
                unit_state.close()  # a forward that had no backward, or failed, left it open
        for unit_state in self._idle:
            unit_state.begin()
        self.root.open()

    def _begins(self, unit_state: UnitState, module: nn.Module, inputs: Any) -> None:
        """Open a unit before one of its modules runs, and begin to gather the next one."""
        if in_backward():  # activation checkpointing recomputes this forward
            self._enter_backward()
        elif self._inside and get_ident() != self._thread:
            raise other_thread(unit_state.unit.name)
        elif self._inside and not unit_state.is_running:
            unit_state.is_running = True
            unit_state.run = len(self._runs)
            self._runs.append(unit_state)
            ahead = self._next(unit_state)
            for each in self._idle:
                if each is not unit_state and each is not ahead and self.reshard and not self._held_open:
                    each.close()  # the order of units has changed
            unit_state.open()
            self._idle = [] if ahead is None or ahead is unit_state else [ahead]
            for each in self._idle:
                each.begin()
        elif not (self._inside or self._held_open):
            raise RuntimeError(
                f"{unit_state.unit.name}: used outside the forward of its ShardedDataParallel, where it has no "
                "parameters; "
                "call the wrapper, or use the module within gather_full()"
            )
        unit_state.open()

    def _next(self, unit_state: UnitState) -> UnitState | None:
        """Find this unit in the previous forward, from the current position on; return the unit that ran next."""
        expected, place = self._expected, self._place
        if unit_state in expected[place:]:
            self._place = expected.index(unit_state, place) + 1
        return expected[self._place] if self._place < len(expected) else None

    def _ends(self, unit_state: UnitState, is_last: bool, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Register hooks on a unit's outputs to detect its backward. Free the unit after its last module."""
        if not self._inside or in_backward():
            return
        with_gradients = torch.is_grad_enabled()
        if with_gradients:
            self._prepare_backward(unit_state, outputs)
        if not is_last:
            return
        unit_state.is_running = False
        if self._held_open or (with_gradients and not self.reshard):
            return
        following = self._expected[self._place : self._place + 1]
        if unit_state in following or (with_gradients and self._expected and not following):
            self._idle.append(unit_state)  # it is kept because it runs again next, or because its backward comes first
            return
        unit_state.close()
        if torch.is_autocast_enabled(unit_state.flat_parameters[0].device.type):
            torch.clear_autocast_cache()  # the flat tensor contains 16-bit copies of whole parameters

    def _prepare_backward(self, unit_state: UnitState, outputs: Any) -> None:
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        if not tensors:
            raise RuntimeError(
                f"{unit_state.unit.name}: it returns a {type(outputs).__name__}, in which no tensor can be found; "
                "return tensors, or tuples, lists and dictionaries of tensors"
            )
        begins = partial(self._backward_begins, unit_state, self._runs, unit_state.run, len(self._runs))
        for each in tensors:
            if each.grad_fn is not None:
                each.register_hook(begins)  # type: ignore[no-untyped-call]

    def _record_order(self) -> None:
        """Record the order in which units ran. Their gradients are launched in the reverse order."""
        if torch.is_grad_enabled() and self._reducer is not None and self._runs != self._expected:
            first = {id(unit_state): -place for place, unit_state in reversed(list(enumerate(self._runs)))}
            first[id(self.root)] = 2
            order = {
                id(each): first.get(id(unit_state), 1) for unit_state in self.unit_states for each in unit_state.buckets
            }
            self._reducer.reorder(lambda bucket: order[id(bucket)])
        self._expected = self._runs
        if torch.is_grad_enabled():
            self._order.ask([self.unit_states.index(each) for each in self._runs])

    # The backward ---------------------------------------------------------------------------------------------------

    def _open_in_backward(self, unit_state: UnitState) -> None:
        self._enter_backward()
        unit_state.open()

    def _enter_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._over, self._unsettled = task, {}, []
            Variable._execution_engine.queue_callback(self._backward_ends)
        self.root.open()

    def _backward_begins(self, unit_state: UnitState, runs: Runs, run: int, end: int, gradient: Tensor) -> None:
        """Free later units and launch their gradients. Open this unit, and begin to gather the previous one.

        `run` is this unit's position in the forward `runs`. Units at position `end` and later began after this unit had
        ended.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{unit_state.unit.name}: a backward with create_graph=True is differentiated again, but the "
                "parameters that this needs are freed; keep them whole with stage=2"
            )
        self._enter_backward()
        if self._over.get(id(unit_state)) is runs:  # also an input of the unit; its gradient is complete last
            return
        with as_it_is():
            for place in range(end, len(runs)):
                if self._over.get(id(runs[place])) is runs:
                    break
                if runs[place] not in runs[:end]:
                    self._is_over(runs[place], runs)
            self._launch(unit_state if run == 0 else None)
        unit_state.open()
        if run:
            runs[run - 1].begin()

    def _is_over(self, unit_state: UnitState, runs: Runs) -> None:
        self._over[id(unit_state)] = runs
        self._unsettled.append(unit_state)
        if not self._held_open:
            unit_state.close()

    def _launch(self, first: UnitState | None) -> None:
        """Launch the gradients of units whose backward is over, and the complete gradients of the unit `first`."""
        if self._reducer is not None:
            if first is not None:
                self._reducer.release(first.buckets, are_over=False)
            self._unsettled = [each for each in self._unsettled if not self._reducer.release(each.buckets)]

    def _backward_ends(self) -> None:
        if not in_backward():  # reentrant activation checkpointing runs nested backwards
            self._task = -1
            self.close()
