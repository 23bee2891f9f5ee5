"""Continue in the same process when ranks are lost or join: keep the state, wait for an order, form another group.

    step n ─ step n+1 ─x      a connection broke, or the supervisor cut it: drop the group, report, wait for an order
                       └─ order: rank, world size, store ─ join ─ build ─ newest state of a living rank ─ step n+1

The ranks that continue have done n or n + 1 steps, because a step needs all of them. The newest state counts. Other
ranks, and those that have just started, receive it from a rank that has it, as the parts of a checkpoint. So at most
one step is repeated. Wrappers, optimizer and graphs are built anew, as after the start.

If no living rank has a part of the state (ZeRO), all ranks instead load a checkpoint from the memory of their nodes.
"""

import gc
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import head_of, length_of, whole_text
from muster.ddp.timeouts import lost_at_once
from muster.jobs.basics.errors import MusterError
from muster.jobs.checkpoint.pieces import whole
from muster.jobs.hosts import ranks
from muster.jobs.node import page
from muster.jobs.node.orders import Orders
from muster.jobs.node.page import Phase
from muster.jobs.node.rank_start import become_another
from muster.jobs.node.reports import Reporter
from muster.jobs.tensors.modules import persistent_buffers
from muster.jobs.tensors.parts import TensorPart, dtype_of
from muster.jobs.train.data import Data
from muster.jobs.train.trained import CarriedStep
from muster.jobs.train.trainer import Trainer
from muster.jobs.user import code
from muster.jobs.world.connections import GroupConnections, StoreConnection, leave_group
from muster.jobs.world.failures import is_lost_connection
from muster.jobs.world.guard import complain
from muster.jobs.world.world import World

PATIENCE_S: Final = 600.0  # how long to wait for an order; the supervisor decides earlier
# Settings that turn off what PyTorch does if NCCL finds a lost peer. It would end the process, after it has slept for a
# minute, so that all ranks can write a trace.
OWN_HANDLING: Final = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)
NONE: Final = -1
COPIED: Final = ("gather_scatter", "allreduce", "flat", "overlap", "bucketed", "ddp")  # syncs that replicate all state
SHARDED: Final = ("sharded", "fsdp")  # syncs of which each rank has a shard of the state
FIRST: Final = (0, 1, 1)  # the group of rank 0
KEY: Final = 0x4D75737465720000  # added to the numbers of `LivingState.check`, so that no other data has them


class Interrupted(Exception):
    """The attempt has ended for this rank, which can continue in the next one."""


@dataclass(frozen=True)
class NewestState:
    """The steps done at the newest state, the ranks that have it, and those that lack it."""

    done: int
    holders: Sequence[int]
    others: Sequence[int]
    evaluated: bool  # all holders have completed the evaluation that follows this step, if there is one

    @classmethod
    def of(cls, told: Sequence[Sequence[int]], parts: Sequence[Sequence[int]] = (), mine: int = 0) -> "NewestState":
        """Choose the newest of the states that all ranks have told: (steps done, step of the last evaluation). Pure.

        `parts`: the ranks that have each part of a split model. A rank of every part must have this state. The result
        lists the ranks of part `mine`.

        Raises:
            MusterError: if there is no such state.
        """
        parts = parts or [range(len(told))]
        common = set.intersection(*({told[rank][0] for rank in part} for part in parts)) - {NONE}
        if not common:
            raise MusterError("no rank has kept the state of the last attempt, or not of the same step")
        newest = max(common)
        holders = [rank for rank in parts[mine] if told[rank][0] == newest]
        others = [rank for rank in parts[mine] if rank not in holders]
        having = [evaluated for done, evaluated in told if done == newest]
        return cls(newest, holders, others, all(evaluated == newest for evaluated in having))

    def routes(self, *, one_root: bool) -> list[tuple[int, ...]]:
        """List the ways of the state: from a holder to a rank that lacks it, or (`one_root`) from one holder to all.

        NCCL would create a communicator for every pair, and cannot reliably abort several at once.
        """
        if one_root:
            root = self.holders[0]
            every = (root, *(rank for rank in (*self.holders, *self.others) if rank != root))
            return [every] if self.others else []
        return [(self.holders[index % len(self.holders)], rank) for index, rank in enumerate(self.others)]


class LivingState:
    """What a rank keeps while it passes from one attempt to the next. `stays`: the job lets ranks continue."""

    def __init__(self, orders: Orders, *, stays: bool) -> None:
        self.orders = orders
        self.stays = stays and orders.are_possible
        self.trainer: Trainer | None = None
        self.data: Data | None = None
        self.device_index: int | None = None  # of the CUDA device that this rank has used
        self.done = NONE
        self.evaluated = NONE
        # this rank has trained, or was ordered to join: after a lost connection, an order comes
        self._can_wait = False
        self.regroups = False  # this attempt continues in place
        self.begun = 0  # the newest step that this rank began to save on disk
        self.carried: list[CarriedStep] = []  # steps of the last attempt that the ranks have not reported together
        self._in_step = False
        self._has_passed = False  # the process has passed to another attempt, and completed no step in it
        self._cleans = False  # the next step first frees what the last attempt has left
        self._buffers: list[tuple[Tensor, Tensor]] = []  # buffers, and their values before the step in progress
        self._world = World(0, 1, None, torch.device("cpu"))
        self._exchanges = False  # a check also exchanges numbers with the other ranks
        self._exchanged = 0
        self.store = StoreConnection()
        self._connections = GroupConnections(self.store)
        if self.stays:
            for name in OWN_HANDLING:
                os.environ.setdefault(name, "0")
            orders.listen()

    # In a step ------------------------------------------------------------------------------------------------------

    def among(self, world: World) -> World:
        """Return the world of an attempt, which checks the values that it gathers."""
        self._world, self._exchanges, self._exchanged = world, world.device.type == "cuda", 0
        return replace(world, check=self.check)

    def hold(self, trainer: Trainer, done: int) -> None:
        """Hold the state of a trainer after `done` steps."""
        self.trainer, self.done, self._in_step = trainer, done, False
        self.device_index, self._can_wait = trainer.world.device.index, True
        buffers = [buffer for _, buffer in persistent_buffers(trainer.engine.module)] if self.stays else []
        self._buffers = [(buffer, torch.empty_like(buffer)) for buffer in buffers]
        self._exchanges = self._exchanges or is_split(trainer)
        can_stay = self.stays and (reloads(trainer) or not why_unique(trainer))
        trainer.engine.before_update = self.check if can_stay else None

    @cached_property
    def own_code(self) -> dict[str, str]:
        """The user's own files, as they were when this process first began to train as rank 0."""
        return code.files_of(Path.cwd())

    def check(self) -> None:
        """Wait until the device has done its work so far, and check that no collective in it was aborted.

        An order comes before it aborts collectives, so this rank has aborted none without an order. But on GPUs another
        rank may have: an aborted kernel of NCCL passes wrong values on, and its peers end as if these were right. And
        all parts of a split model must be updated, or none. So the ranks exchange numbers, which a rank with an order
        does not send.

        Raises:
            Interrupted: if an order has come, to this rank or another one.
        """
        if not self.stays:
            return
        world = self._world
        if world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self.orders.has_come:
            raise Interrupted("the group has ended")
        if self._exchanges:
            self._exchanged += 1
            first = KEY + self._exchanged * world.size
            numbers = world.gather(torch.tensor(first + world.rank, device=world.device))
            if torch.stack(numbers).tolist() != [*range(first, first + world.size)]:
                raise Interrupted("another rank has left the group")

    def begin(self, trainer: Trainer, done: int, reporter: Reporter) -> None:
        """Hold the state of a trainer, and report which ranks have copies of it."""
        self.hold(trainer, done)
        if self.stays and trainer.world.rank == 0:
            reporter.replicas(*replicas_of(trainer), reloads=reloads(trainer))

    def end(self) -> None:
        """Drop the state: after the last attempt, or before a checkpoint replaces it.

        The trainer's world refers to this object, and NCCL cannot destroy a group while a cycle keeps a CUDA graph.
        """
        self.trainer, self._buffers, self.done = None, [], NONE

    def begin_step(self) -> None:
        """Copy what a forward changes, which are the running statistics of batch norms."""
        self._in_step = True
        if self._cleans:  # after the first step, so that it does not delay this one
            self._cleans = False
            gc.collect()  # what the last attempt has left in cycles of references, such as data-loader processes
        for buffer, room in self._buffers:
            room.copy_(buffer)

    def step_done(self, done: int) -> None:
        """Record that this rank has updated its parameters, for the `done`-th time."""
        self.done, self._in_step = done, False
        self._cleans, self._has_passed = self._has_passed, False

    def take_carried(self, first: int) -> list[CarriedStep] | None:
        """Return the steps up to `first` that no attempt has reported; None if this attempt does not go on in place."""
        carried, self.carried = [each for each in self.carried if each.number <= first], []
        return carried if self.regroups else None

    def undo_step(self) -> None:
        """Undo what an incomplete step has changed."""
        if self._in_step:
            for buffer, room in self._buffers:
                buffer.copy_(room)
        self._in_step = False

    # Between two attempts -------------------------------------------------------------------------------------------

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let an order interrupt the work in this context.

        Raises:
            Interrupted: if the attempt has ended, but this rank can continue.
        """
        if not self.stays:
            yield
            return
        self._connections = GroupConnections(self.store)
        self.orders.work(self._cut)
        try:
            with lost_at_once():
                yield
        except Interrupted:
            raise
        except Exception as error:
            lost = self._can_wait and is_lost_connection(error)
            if not lost and not self.orders.has_come:
                raise
            # An aborted collective of NCCL ends with wrong values, and what reads these may fail in any way.
            raise Interrupted(str(error).partition("\n")[0] if lost else "the group has ended") from error

    def _cut(self) -> None:
        """Break this rank's collectives, from another thread.

        NCCL aborts a communicator when no graph uses it any more, and a graph is destroyed when its collectives have
        ended, because they are aborted. So both happen at the same time, as do the ends of a pipeline's messages.
        """
        cutting = threading.Thread(target=self._connections.cut, name="abort", daemon=True)
        cutting.start()
        if self.trainer is not None:
            self.trainer.engine.cut()
        cutting.join()

    def connected(self) -> None:
        """Record that the group of this attempt is complete."""
        self._connections.complete()

    def next_order(
        self, why: str, reporter: Reporter, *, timeout_s: float | None = PATIENCE_S
    ) -> Mapping[str, Any] | None:
        """Leave the group, and wait for an order; return None if none comes."""
        self._cut()  # the other ranks notice at once
        self._connections.leave()
        page.own.enter(Phase.START)
        why = why.split(". This is typically")[0]  # gloo's advice
        reporter.waiting(of=ranks.read(os.environ).attempt, step=max(self.done, 0), why=why)
        complain(f"muster: after step {max(self.done, 0)}: {why}; waiting for the next attempt")
        order = self.orders.next(timeout_s)
        if order is not None:
            leave_group()
            become_another(order)
            self._has_passed = self._can_wait = True
        return order


def replicas_of(trainer: Trainer) -> tuple[list[tuple[int, int, int]], str]:
    """List the groups of ranks of which one must live, as (first, count, stride); none, and why, if all must."""
    engine, world = trainer.engine, trainer.world
    if why := why_unique(trainer):
        return [], why
    # Only rank 0 has the running statistics of batch norms.
    buffers = any(True for _ in persistent_buffers(engine.module))
    parts = [(part[0], len(part), world.tensor) for part in parts_of(world)]
    return [*parts, *([FIRST] if buffers else [])], ""


def parts_of(world: World) -> list[range]:
    """List the ranks that have copies of the same part of a model, for every part."""
    stage = world.data_ranks * world.tensor
    firsts = [first + tensor for first in range(0, world.size, stage) for tensor in range(world.tensor)]
    return [range(first, first + stage, world.tensor) for first in firsts]


def is_split(trainer: Trainer) -> bool:
    """Return whether each rank has only some of the layers, or only a part of each layer."""
    return trainer.engine.stages is not None or trainer.world.tensor > 1


def why_unique(trainer: Trainer) -> str:
    """Return why no rank has the state of another; "" if all ranks have all of the state."""
    stages = trainer.engine.stages
    if trainer.settings.sync not in COPIED or (is_split(trainer) and trainer.settings.parallel is None):
        return "no rank has a copy of the state of another"
    if stages is not None and trainer.engine.model.whole.buffers:
        return "the stages have running statistics, which only one copy of each has"
    return ""


def reloads(trainer: Trainer) -> bool:
    """Return whether the ranks that are left can load a checkpoint from memory without a restart.

    They are any number of ranks, or of whole copies of a split model.
    """
    has_copies = not is_split(trainer) or trainer.settings.parallel is not None
    return has_copies and trainer.settings.sync in (*COPIED, *SHARDED)


def take_over(living: LivingState, trainer: Trainer, reporter: Reporter) -> NewestState:
    """Give a new trainer the newest state of any rank: a collective. Then the rank keeps the new trainer's state.

    Raises:
        MusterError: if no rank has a state.
        RefusedError: if the state belongs to another model.
    """
    began_s, world, engine = time.monotonic(), trainer.world, trainer.engine
    told = world.gather(torch.tensor([living.done, living.evaluated], device=world.device))
    parts = parts_of(world)
    mine = next(index for index, part in enumerate(parts) if world.rank in part)
    source = NewestState.of([each.tolist() for each in told], parts, mine)
    if living.done == source.done:
        living.undo_step()
    own = {} if living.trainer is None else {part.piece.name: part for part in living.trainer.engine.state.copies()}
    # Rank 0's batch norms have already seen the step that other ranks have completed.
    buffers = {f"model/{name}" for name, _ in persistent_buffers(engine.module)} if world.rank == 0 else set()
    for route in source.routes(one_root=world.device.type == "cuda"):
        received = pass_on(own, route, world, engine.replica.world.group)
        if world.rank in route and world.rank in source.others:
            own = received | {name: part for name, part in own.items() if name in buffers}
    for part in engine.state.wanted_copies({name: part.piece for name, part in own.items()}):
        with torch.no_grad():
            part.tensor.copy_(own[part.piece.name].tensor)
    living.check()
    engine.replica.refresh()
    living.regroups = True
    behind = sum(0 <= done < source.done for done, _ in (each.tolist() for each in told))
    living.hold(trainer, source.done)
    if world.rank == 0:
        seconds = time.monotonic() - began_s
        reporter.regrouped(step=source.done, redone=behind, source=source.holders[0], seconds=seconds)
    return source


def pass_on(
    own: Mapping[str, TensorPart], route: Sequence[int], world: World, group: dist.ProcessGroup | None
) -> dict[str, TensorPart]:
    """Pass whole tensors on from the first rank of a route to its other ranks, after a list of their names and shapes.

    `group`: the ranks with the same part of the model. Ranks that are not on the route do nothing.
    """
    if world.rank not in route:
        return {}
    has = world.rank == route[0]
    pieces = [(part.piece.name, part.piece.dtype, part.piece.shape) for part in own.values()] if has else []
    told = json.dumps(pieces).encode()
    head = _to(world.device, head_of(told))
    _move(head, route, world.rank, group)
    length, digest = length_of(bytes(head.tolist()))
    text = _to(world.device, told if has else bytes(length))
    _move(text, route, world.rank, group)
    parts = {}
    for name, dtype, shape in json.loads(whole_text(bytes(text.tolist()), length, digest)):
        piece = whole(name, dtype, tuple(shape))
        tensor = own[name].tensor if has else torch.empty(piece.shape, dtype=dtype_of(piece), device=world.device)
        if piece.nbytes:
            _move(_bytes(tensor).to(world.device), route, world.rank, group)
        parts[name] = TensorPart(piece, tensor)
    return parts


def _move(tensor: Tensor, route: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> None:
    """Copy a tensor of the first rank of a route to the others: over NCCL to all ranks of the group, else to one."""
    if tensor.is_cuda:
        dist.broadcast(tensor, route[0], group=group)
    elif rank == route[0]:
        dist.send(tensor, route[1], group=group)
    else:
        dist.recv(tensor, route[0], group=group)


def _to(device: torch.device, text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
