"""What the ranks agree on before anything is measured."""

import pytest
import torch

from muster.collectives_bench.ranks.bench_ranks import BenchRanks, RankHost, assemble, device_of, hosts_of
from muster.collectives_bench.records import HostFacts, WorldRecord
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.world.world import Peer

TWO_GPUS = [Peer("a", None, 2), Peer("a", None, 2)]
TOO_FEW = [Peer("a", None, 1), Peer("a", None, 1)]
MIXED = [Peer("a", None, 1), Peer("b", None, 0)]
NONE = [Peer("a", None, 0), Peer("b", None, 0)]


@pytest.mark.parametrize(
    ("backend", "device", "peers", "wanted"),
    [
        ("auto", "auto", TWO_GPUS, ["cuda:0", "cuda:1"]),
        ("auto", "auto", TOO_FEW, ["cpu", "cpu"]),
        ("auto", "auto", MIXED, ["cpu", "cpu"]),
        ("auto", "auto", NONE, ["cpu", "cpu"]),
        ("auto", "cpu", TWO_GPUS, ["cpu", "cpu"]),
        ("auto", "cuda", TWO_GPUS, ["cuda:0", "cuda:1"]),
        ("gloo", "auto", TWO_GPUS, ["cpu", "cpu"]),
        ("gloo", "cuda", TWO_GPUS, ["cuda:0", "cuda:1"]),
        ("nccl", "auto", TWO_GPUS, ["cuda:0", "cuda:1"]),
    ],
)
def test_every_rank_gets_a_gpu_of_its_own_or_none_does(backend, device, peers, wanted) -> None:
    settings = BenchSettings(operation=["barrier"], backend=backend, device=device)
    assert [device_of(settings, rank, peers) for rank in (0, 1)] == [torch.device(each) for each in wanted]


@pytest.mark.parametrize(("backend", "device"), [("nccl", "auto"), ("auto", "cuda"), ("gloo", "cuda")])
@pytest.mark.parametrize("peers", [TOO_FEW, MIXED, NONE])
def test_gpus_that_were_asked_for_and_are_not_there_are_refused(backend, device, peers) -> None:
    settings = BenchSettings(operation=["barrier"], backend=backend, device=device)
    with pytest.raises(RefusedError, match=r"^bench\.device: "):
        device_of(settings, 0, peers)


def test_pairs_of_one_node_are_refused_however_many_ranks_it_has() -> None:
    env = RankEnv(0, 4, 0, 4, 0, 1, "127.0.0.1", 1)
    with pytest.raises(RefusedError, match=r"^bench\.pairs: needs 2 nodes or more, but this job has 1"):
        assemble(env, BenchSettings(operation=["barrier"], pairs=True), 1.0, lambda: None)


def test_a_node_has_the_cores_of_all_its_ranks_in_whatever_order_they_come() -> None:
    facts = {node: HostFacts(node=node, host=f"n{node}", cores=1, ranks=2).model_dump() for node in (0, 1)}
    said = [
        {"node": 0, "cores": [0], "host": facts[0]},
        {"node": 1, "cores": [0, 1], "host": facts[1]},
        {"node": 0, "cores": [1], "host": None},
        {"node": 1, "cores": [0, 1], "host": None},
    ]
    assert [(host.node, host.cores) for host in hosts_of(said)] == [(0, 2), (1, 2)]


def test_ranks_that_share_a_machine_are_companions_and_one_of_each_network_counts_its_bytes() -> None:
    """Two containers on one machine, the second with two ranks, and a third one elsewhere."""
    rank_hosts = [
        RankHost("x", "m", "m/1", ""),
        RankHost("y", "m", "m/2", ""),
        RankHost("y", "m", "m/2", ""),
        RankHost("z", "o", "o/1", ""),
    ]
    world = WorldRecord(nodes=3, ranks_per_node=1, ranks=4, backend="gloo", device="cpu")
    env = RankEnv(0, 4, 0, 1, 0, 3, "127.0.0.1", 1)
    bench_ranks = BenchRanks(env, None, rank_hosts, [], world, torch.device("cpu"))  # type: ignore[arg-type]
    assert [bench_ranks.companions(rank) for rank in range(4)] == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [3]]
    assert [bench_ranks.counts_the_wire(rank) for rank in range(4)] == [True, True, False, True]
