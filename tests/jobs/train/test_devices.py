"""Which device a rank computes on: pure, and the same answer on every rank."""

import pytest
import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.world.world import Peer, choose_device

CPU = torch.device("cpu")


def devices(wanted: str, peers: list[Peer]) -> list[torch.device]:
    return [choose_device(wanted, rank, peers) for rank in range(len(peers))]


def cuda(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def test_ranks_of_a_host_share_its_devices_in_rank_order() -> None:
    peers = [Peer("a", None, 2), Peer("a", None, 2), Peer("b", None, 4)]
    assert devices("auto", peers) == cuda(0, 1, 0)


def test_pretend_nodes_that_see_different_devices_each_begin_at_the_first() -> None:
    peers = [Peer("a", "0,1", 2), Peer("a", "0,1", 2), Peer("a", "2,3", 2), Peer("a", "2,3", 2)]
    assert devices("cuda", peers) == cuda(0, 1, 0, 1)


def test_ranks_bound_to_one_device_each_by_a_cgroup_take_it() -> None:
    assert devices("cuda", [Peer("a", "0", 1)] * 4) == cuda(0, 0, 0, 0)


def test_without_enough_devices_auto_is_the_cpu_on_all_ranks() -> None:
    assert devices("auto", [Peer("a", None, 2)] * 3) == [CPU] * 3
    assert devices("auto", [Peer("a", None, 0)]) == [CPU]


def test_cpu_is_the_cpu_whatever_there_is() -> None:
    assert devices("cpu", [Peer("a", None, 8)] * 2) == [CPU] * 2


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_ranks_without_a_device_among_ranks_that_have_one_are_named(wanted: str) -> None:
    peers = [Peer("a", None, 1), Peer("b", None, 0)]
    with pytest.raises(RefusedError, match=r"rank 1 of 2 .* \(b has 0\)"):
        choose_device(wanted, 0, peers)


def test_cuda_without_enough_devices_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"train\.device: cuda: ranks 0, 1, 2 of 3"):
        choose_device("cuda", 0, [Peer("a", None, 2)] * 3)
