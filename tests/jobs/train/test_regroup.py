"""A rank that continues in place: which state counts, how others receive it, and how a collective is interrupted."""

import gc
import hashlib
import json
import socket
import time
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from muster.jobs.basics.errors import MusterError
from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.node.orders import Orders
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import move
from muster.jobs.train.data.sampling import GlobalBatch
from muster.jobs.train.profiling.clock import StepTimes
from muster.jobs.train.regroup import NONE, Interrupted, LivingState, NewestState, replicas_of, take_over
from muster.jobs.train.trained import CarriedStep, TrainedStep, gather_carried
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.world.connections import GroupConnections, StoreConnection
from muster.jobs.world.failures import is_lost_connection
from muster.jobs.world.world import World
from support.resuming import GPT, TINY_VGG, VGG

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize(
    ("told", "done", "holders", "evaluated"),
    [
        ([(4, NONE), (4, NONE)], 4, [0, 1], False),
        ([(4, 4), (3, 4), (4, 4)], 4, [0, 2], True),
        ([(4, 4), (4, 3), (NONE, NONE)], 4, [0, 1], False),
        ([(NONE, NONE), (0, NONE)], 0, [1], False),
    ],
)
def test_the_newest_state_counts(told: list, done: int, holders: list, evaluated: bool) -> None:
    source = NewestState.of(told)
    assert (source.done, source.holders, source.evaluated) == (done, holders, evaluated)
    routes = source.routes(one_root=False)
    assert [to for _, to in routes] == list(source.others)
    assert all(root in holders for root, _ in routes)
    (all_at_once,) = source.routes(one_root=True) or [(holders[0], *holders[1:])]
    assert all_at_once[0] == holders[0]
    assert not source.others or sorted(all_at_once) == list(range(len(told)))


def test_the_parts_of_a_split_model_must_have_the_state_of_one_step() -> None:
    told, parts = [(4, 4), (3, 3), (3, 3), (NONE, NONE)], [[0, 1], [2, 3]]
    first, second = NewestState.of(told, parts, 0), NewestState.of(told, parts, 1)
    assert (first.done, first.holders, first.others, first.evaluated) == (3, [1], [0], True)
    assert (second.done, second.holders, second.others) == (3, [2], [3])
    with pytest.raises(MusterError, match="not of the same step"):
        NewestState.of([(4, 4), (4, 4), (3, 3), (NONE, NONE)], parts)


def test_without_any_state_nothing_can_continue() -> None:
    with pytest.raises(MusterError, match="no rank has kept the state"):
        NewestState.of([(NONE, NONE), (NONE, NONE)])


def trainer_of(world: World, settings: dict) -> Trainer:
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    train = TrainSettings.model_validate(settings)
    return build_trainer(train, open_data(train), world)


def test_the_end_frees_the_trainer_without_the_garbage_collector() -> None:
    living = LivingState(Orders(), stays=False)
    trainer = trainer_of(replace(World(0, 1, None, torch.device("cpu")), check=living.check), {**GPT, "mode": "single"})
    gc.collect()
    gc.disable()
    try:
        living.hold(trainer, 0)
        engine = weakref.ref(trainer.engine)
        living.end()
        del trainer
        assert engine() is None  # else NCCL would wait forever for the graphs of the engine
    finally:
        gc.enable()


def step(trainer: Trainer, number: int) -> None:
    work = move(trainer.own_steps()[number], trainer.world.device, trainer.dtype)
    trainer.engine.train_step(number, work.shards)


def digest(trainer: Trainer, without: set[str]) -> str:
    """Return the hash of all state that every rank should have."""
    found = hashlib.sha256()
    for part in trainer.engine.state.copies():
        if part.piece.name not in without:
            found.update(part.piece.name.encode() + part.tensor.detach().numpy().tobytes())
    return found.hexdigest()


def rejoined(world: World, settings: dict) -> list:
    """Do two steps. Rank 1 misses the second one, and rank 2 has just started; then all take over the newest state."""
    before, living = trainer_of(world, settings), LivingState(Orders(), stays=False)
    step(before, 0)
    kept = [part.tensor.clone() for part in before.engine.state.copies()]
    step(before, 1)
    buffers = {f"model/{name}" for name, _ in before.engine.module.named_buffers()}
    wanted = digest(before, buffers)
    if world.rank == 1:
        for part, old in zip(before.engine.state.copies(), kept, strict=True):
            part.tensor.copy_(old)
    if world.rank < 2:
        living.hold(before, 2 - world.rank)
    after = trainer_of(world, settings)
    source = take_over(living, after, Reporter({}))
    received = digest(after, buffers)
    step(after, 2)
    return [wanted, received, source.done, list(source.holders), digest(after, buffers)]


@pytest.mark.parametrize(
    "settings", [{**GPT, "mode": "allreduce"}, {**VGG, "mode": "bucketed"}, {**GPT, "mode": "ddp"}]
)
def test_ranks_behind_and_new_ones_receive_the_newest_state(on_ranks, settings: dict) -> None:
    told = on_ranks(3, rejoined, settings={**settings, "deterministic": True})
    assert [each[2:4] for each in told] == [[2, [0]]] * 3
    assert {each[1] for each in told} == {told[0][0]}  # the state after two steps
    assert len({each[4] for each in told}) == 1  # the same after one more step


def groups(world: World, settings: dict) -> list:
    found, why = replicas_of(trainer_of(world, settings))
    assert bool(found) != bool(why)
    return [list(each) for each in found]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({**GPT, "mode": "flat"}, [[0, 2, 1]]),
        ({**VGG, "mode": "overlap"}, [[0, 2, 1], [0, 1, 1]]),  # only rank 0 has the running statistics
        ({**GPT, "mode": "zero2"}, []),
        ({**GPT, "mode": "1f1b"}, []),
    ],
)
def test_ranks_that_may_be_lost(on_ranks, settings: dict, wanted: list) -> None:
    assert on_ranks(2, groups, settings=settings) == [wanted] * 2


def test_ranks_of_a_split_model_that_may_be_lost(on_ranks) -> None:
    split = {"data": 2, "pipe": 2, "sync": "bucketed", "microbatches": 2}
    assert on_ranks(4, groups, settings={**GPT, "parallel": split}) == [[[0, 2, 1], [2, 2, 1]]] * 4


def interrupted(world: World) -> list:
    """Rank 0 waits for rank 1, which never joins its collective, until an order comes."""
    connections = GroupConnections(StoreConnection())
    group = dist.new_group([0, 1])
    connections.complete()
    dist.barrier()  # both ranks are connected
    ours, theirs = socket.socketpair()
    orders = Orders(theirs.detach())
    orders.listen()
    orders.work(connections.cut)
    if world.rank == 0:
        ours.sendall(json.dumps({"rank": 7}).encode() + b"\n")
    try:
        dist.all_reduce(torch.ones(4), group=group) if world.rank == 0 else dist.recv(torch.ones(4), 0, group=group)
        lost = False
    except RuntimeError as error:
        lost = is_lost_connection(error)
    order = orders.next(10.0) if world.rank == 0 else None
    dist.barrier()  # the connections of other groups are untouched
    return [lost, order]


def test_an_order_interrupts_a_collective_on_both_sides(on_ranks) -> None:
    assert on_ranks(2, interrupted) == [[True, {"rank": 7}], [True, None]]


def checked(world: World) -> list:
    """Rank 1 gets an order between two checks. Rank 0, which has another stage of the model, gets none."""
    connections = GroupConnections(StoreConnection())
    ours, theirs = socket.socketpair()
    living = LivingState(Orders(theirs.detach()), stays=True)
    world = living.among(replace(world, group=dist.new_group([0, 1])))
    living.hold(trainer_of(world, {**GPT, "parallel": {"pipe": 2}}), 0)
    connections.complete()
    living.check()
    if world.rank == 1:
        ours.sendall(json.dumps({"rank": 7}).encode() + b"\n")
        deadline = time.monotonic() + 30.0
        while not living.orders.has_come and time.monotonic() < deadline:
            time.sleep(0.01)
    try:
        living.check()
        why = "it would update its stage"
    except Interrupted:
        why = "interrupted"
        connections.cut()
    except RuntimeError as error:
        why = "lost" if is_lost_connection(error) else str(error)
    dist.barrier()
    ours.close()
    return [why]


def test_no_stage_is_updated_if_another_one_has_an_order(on_ranks) -> None:
    assert on_ranks(2, checked) == [["lost"], ["interrupted"]]


def test_a_process_without_a_rank_parent_gets_no_orders() -> None:
    assert Orders().next(0.0) is None
    assert not LivingState(Orders(), stays=True).stays


def carried_by(world: World) -> list:
    """Return what is left of the steps of three ranks: the first is a step behind, the last has just started."""
    steps = {0: (3,), 1: (3, 4), 2: ()}[world.rank]

    def step(number: int) -> CarriedStep:
        batch = GlobalBatch(number - 1, 0, 0, 12)
        losses = [torch.tensor(float(number + world.rank)), torch.tensor(1.0)]
        return CarriedStep(0, TrainedStep(batch, losses, 4, 0.1, 0.0), StepTimes(0.1, {}))

    return [[number, *left] for number, left in gather_carried(world, [step(number) for number in steps]).items()]


def test_losses_that_are_left_are_added_over_the_ranks_that_have_them(on_ranks) -> None:
    assert on_ranks(3, carried_by) == [[[3, 9.0, 8], [4, 6.0, 4]]] * 3
