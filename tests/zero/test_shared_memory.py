"""Ranks of one host share memory; if one cannot, all use messages."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, shared_memory
from muster.zero.gather import LinkGather, SharedMemoryGather
from muster.zero.scatter import ExchangeScatter, LinkScatter, SharedMemoryScatter
from muster.zero.shared_memory import shared_memory_peers
from support.sharded import Run, over_links, wrong_training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CPU = torch.device("cpu")


def sees_what_others_write(world: World) -> list[object]:
    """Return what this rank reads in every rank's memory, and how many anonymous files stay open."""
    near = shared_memory_peers(world.group, CPU)
    assert near is not None
    whole, nothing, odd = near.share([(4, torch.float32), (0, torch.float32), (3, torch.bfloat16)])
    whole[world.rank].fill_(world.rank + 1.0)
    odd[world.rank].fill_(-1.0 - world.rank)
    near.meeting()()
    open_files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return [
        [each.tolist() for each in whole],
        [each.tolist() for each in odd],
        [each.numel() for each in nothing],
        sum("memfd:shard" in name for name in open_files),
    ]


def test_a_rank_reads_what_the_others_write(on_ranks):
    wanted = [[[1.0] * 4, [2.0] * 4, [3.0] * 4], [[-1.0] * 3, [-2.0] * 3, [-3.0] * 3], [0, 0, 0], 0]
    assert on_ranks(3, sees_what_others_write) == [wanted] * 3


def when_one_cannot(world: World) -> list[object]:
    """Return the results if rank 1 cannot read, if it has no memfd_create, and the messages of failures in `share`."""
    cannot = mock.patch.object(shared_memory, "_reads", return_value=world.rank != 1)
    missing = mock.patch.object(shared_memory.os, "memfd_create", side_effect=OSError("none here"))
    found: list[object] = []
    with cannot:
        found.append(shared_memory_peers(world.group, CPU))
    if world.rank == 1:
        with missing:
            found.append(shared_memory_peers(world.group, CPU))
    else:
        found.append(shared_memory_peers(world.group, CPU))
    near = shared_memory_peers(world.group, CPU)
    assert near is not None
    for name, error in (
        ("_mapped", RuntimeError("no memory left\nC++ says more")),
        ("_file", OSError("no files left")),
    ):
        fails = mock.patch.object(shared_memory, name, side_effect=error)
        with fails if world.rank == 1 else nullcontext(), pytest.raises(RuntimeError) as caught:
            near.share([(4, torch.float32)])
        found.append(str(caught.value))
    return found


def test_where_one_rank_cannot_none_does_and_a_failure_is_told_to_all(on_ranks):
    said = "shared memory between the ranks of this host could not be"
    failed = [f"{said} mapped: rank 1: no memory left", f"{said} created: rank 1: no files left"]
    assert on_ranks(3, when_one_cannot) == [[None, None, *failed]] * 3


def ways(world: World) -> list[str]:
    """Return what is wrong with trainings over messages, and with the chosen classes on one host and on several."""
    problems = []
    for far, gather, scatters in (
        (False, SharedMemoryGather, (SharedMemoryScatter, LinkScatter, ExchangeScatter)),
        (True, LinkGather, (LinkScatter, LinkScatter, LinkScatter)),
    ):
        with over_links() if far else nullcontext():
            for stage, scatter in zip((1, 2, 3), scatters, strict=True):
                model = ShardedDataParallel(nn.Linear(3, 5), world.group, stage=stage)
                if (type(model.gather), type(model.scatter)) != (gather, scatter):
                    problems.append(f"stage {stage}, far {far}: {type(model.gather)}, {type(model.scatter)}")
                if far:
                    problems += wrong_training(world, Run("ragged", "adamw", stage, clip=0.1))
    return problems


def test_ranks_that_are_far_train_over_messages(on_ranks):
    assert on_ranks(3, ways) == [[]] * 3


def accumulates(world: World) -> list[str]:
    """Run two synchronizations without a step: no rank may overwrite gradients that another still sums."""
    problems = []
    for stage in (1, 2, 3):
        layer = nn.Linear(64, 64, bias=False)
        nn.init.eye_(layer.weight)
        model = ShardedDataParallel(nn.Sequential(layer), world.group, stage=stage)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.0)
        for turn in range(20):
            optimizer.zero_grad()
            for part in (1.0, 2.0):
                model(torch.full((1, 64), part * (world.rank + 1))).sum().backward()
            found = model.full_gradients()["0.weight"]
            mean = 3.0 * sum(range(1, world.size + 1)) / world.size
            if not torch.allclose(found, torch.full_like(found, mean)):
                problems.append(f"stage {stage}, turn {turn}: {found.unique().tolist()}, wanted {mean}")
    return problems


def test_gradients_that_are_synchronized_twice_are_the_sum_of_both_means(on_ranks):
    assert on_ranks(4, accumulates) == [[]] * 4


def far_from_near(world: World) -> list[str]:
    """Return the trainings whose bits differ between shared memory and messages."""
    found = []
    for stage, exact in itertools.product((1, 2, 3), (False, True)):
        bits = []
        for far in (False, True):
            with over_links() if far else nullcontext():
                torch.manual_seed(1)
                module = nn.Sequential(*(nn.Linear(97, 97) for _ in range(3)))
                model = ShardedDataParallel(module, world.group, stage=stage, exact=exact)
                optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
                torch.manual_seed(world.rank)
                for _ in range(5):
                    optimizer.zero_grad()
                    model(torch.randn(16, 97)).square().mean().backward()
                    optimizer.step()
                with model.gather_full():
                    bits.append([each.detach().clone() for each in module.parameters()])
        if not all(map(torch.equal, *bits)):
            found.append(f"stage {stage}" + ", exact" * exact)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_where_ranks_are_moves_no_bit_of_two_ranks_nor_of_exact_sums(on_ranks, ranks: int) -> None:
    depends = {2: [], 4: ["stage 1", "stage 3"]}[ranks]  # more than two numbers are added in another order
    assert on_ranks(ranks, far_from_near) == [depends] * ranks
