"""How ranks find one another: the port, the store, and one process for each rank."""

import socket
import threading
import time
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from muster.jobs.basics.errors import RefusedError, StartTimeoutError
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.world.meeting import answers, connect, listen, meet
from support.bench import free_port

ALONE = RankEnv(0, 1, 0, 1, 0, 1, "127.0.0.1", 29500)


def test_a_second_process_of_one_rank_is_refused() -> None:
    store = HashStore()
    assert len(meet(store, ALONE, 5.0)) == 1
    with pytest.raises(RefusedError, match="rank 0 was started twice"):
        meet(store, ALONE, 5.0)


def test_two_ranks_meet_through_the_store_that_the_first_one_serves() -> None:
    first = replace(ALONE, world_size=2, nodes=2, master_port=free_port())
    second = replace(first, rank=1, node_rank=1)
    met: list[int] = []
    # The second one dials before there is anybody: it waits.
    thread = threading.Thread(target=lambda: met.append(len(meet(connect(second, 10.0), second, 10.0))))
    thread.start()
    store = connect(first, 10.0)
    assert len(meet(store, first, 10.0)) == 2
    thread.join()  # and only then may the store go
    assert met == [2]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.10.1.1"])
def test_a_port_in_use_is_refused_whatever_the_address(address: str) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RefusedError, match=f"^port {port} is taken on this machine; choose another --master-port$"):
            listen(replace(ALONE, master_addr=address, master_port=port))


def test_ranks_of_one_machine_meet_where_nobody_outside_can_dial() -> None:
    with listen(replace(ALONE, master_port=free_port())) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_without_a_master_the_wait_ends_at_its_deadline() -> None:
    began = time.monotonic()
    assert not answers("127.0.0.1", free_port(), began + 0.3)
    assert 0.3 <= time.monotonic() - began < 5.0
    env = replace(ALONE, rank=1, world_size=2, master_port=free_port())
    with pytest.raises(StartTimeoutError, match=r"rank 1 found no master within 0\.2 s"):
        connect(env, 0.2)


def test_a_rank_whose_store_goes_away_blames_the_process_that_served_it() -> None:
    first = replace(ALONE, world_size=2, nodes=2, master_port=free_port())
    second = replace(first, rank=1, node_rank=1)
    served, mine = connect(first, 10.0), connect(second, 10.0)
    raised: list[BaseException] = []

    def wait_for_the_first() -> None:
        try:
            meet(mine, second, 10.0)
        except StartTimeoutError as error:
            raised.append(error)

    thread = threading.Thread(target=wait_for_the_first)
    thread.start()
    served.wait(["arrived/1"])
    del served
    thread.join()
    assert [str(error).partition(" at ")[0] for error in raised] == ["rank 1 was waiting for the others when the store"]
