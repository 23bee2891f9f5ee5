"""Links of a real box are as fast as they are said to be, and not faster: in both directions, and for a slow pair."""

import subprocess
from collections.abc import Iterator, Sequence

import pytest

from muster.cloudlab.box.control import Box
from muster.cloudlab.box.network import burst_bytes
from muster.jobs.basics.errors import UsageError

pytestmark = [pytest.mark.command, pytest.mark.cluster]

RATE = 80_000_000  # bits a second: 10 MB/s
SIZE = 2_000_000
# A receiver takes all that each sender sends, and then tells it so; a sender prints when it began and when it was told.
RECEIVE = """
import socket, sys, threading
server = socket.create_server(('', 7100), backlog=64)
print('ready', flush=True)
def drain(peer):
    while peer.recv(1 << 20):
        pass
    peer.close()
threads = [threading.Thread(target=drain, args=(server.accept()[0],)) for _ in range(int(sys.argv[1]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7100))
began = time.monotonic()
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(began, time.monotonic())
"""


@pytest.fixture
def shaped(box: Box) -> Iterator[Box]:
    """The box with slow links; fast again afterwards."""
    box.rate(RATE)
    yield box
    box.rate(None)


def transfer_s(box: Box, senders: Sequence[str], receiver: str, size: int = SIZE) -> float:
    """Return how long it takes that all senders bring `size` bytes each to one node."""
    argv = box.exec_argv(receiver, ["python3", "-uc", RECEIVE, str(len(senders))])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ready\n"
        words = ["python3", "-c", SEND, box.state.spec.address(receiver), str(size)]
        argvs = [box.exec_argv(sender, words) for sender in senders]
        sending = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for argv in argvs]
        moments = [float(word) for process in sending for word in process.communicate(timeout=30)[0].split()]
        assert [process.returncode for process in sending] == [0] * len(senders)
    return max(moments) - min(moments)


def least_s(size: int, rate: int) -> float:
    """Return the time below which no link of a rate can bring this many bytes.

    Two buckets may be full at the start; and htb lets a last packet go before its time, of 64 KB as hosts make them.
    """
    return (size - 2 * burst_bytes(rate) - 65536) * 8 / rate


def test_a_gather_takes_at_least_what_the_receivers_link_needs(shaped: Box) -> None:
    assert transfer_s(shaped, ["node1", "node2", "node3"], "node0") >= least_s(3 * SIZE, RATE)


def test_one_pair_takes_at_least_what_its_links_need_and_is_faster_without_limits(shaped: Box) -> None:
    limited = transfer_s(shaped, ["node1"], "node2")
    assert limited >= least_s(SIZE, RATE)
    shaped.rate(None)
    assert transfer_s(shaped, ["node1"], "node2") < limited


def test_a_slow_pair_is_slow_in_both_directions_and_the_others_are_not(shaped: Box) -> None:
    slow, size = RATE // 8, SIZE // 4
    shaped.rate(slow, ("node2", "node0"))
    for sender, receiver in (("node0", "node2"), ("node2", "node0")):
        assert transfer_s(shaped, [sender], receiver, size) >= least_s(size, slow)
    for sender, receiver in (("node0", "node1"), ("node3", "node2")):
        assert transfer_s(shaped, [sender], receiver, size) < least_s(size, slow)
    assert shaped.status().slow_pairs == (("node0", "node2", "10mbit"),)
    shaped.rate(None, ("node0", "node2"))
    assert transfer_s(shaped, ["node0"], "node2", size) < least_s(size, slow)
    assert shaped.status().slow_pairs == ()


def test_a_slow_node_is_slow_with_everybody_and_the_others_are_not(shaped: Box) -> None:
    slow, size = RATE // 8, SIZE // 4
    shaped.rate(slow, of="node1")
    for sender, receiver in (("node1", "node3"), ("node0", "node1")):
        assert transfer_s(shaped, [sender], receiver, size) >= least_s(size, slow)
    assert transfer_s(shaped, ["node0"], "node2", size) < least_s(size, slow)
    assert shaped.status().slow_nodes == (("node1", "10mbit"),)
    shaped.rate(None, of="node1")
    assert transfer_s(shaped, ["node1"], "node3", size) < least_s(size, slow)


def test_rates_hold_for_a_node_that_started_again(shaped: Box) -> None:
    shaped.rate(RATE // 8, ("node1", "node2"))
    shaped.fail("node1", "power")
    shaped.rate(RATE // 2)
    shaped.rate(RATE // 4, ("node1", "node2"))
    shaped.heal("node1")
    assert transfer_s(shaped, ["node1"], "node3") >= least_s(SIZE, RATE // 2)
    assert transfer_s(shaped, ["node1"], "node2") >= least_s(SIZE, RATE // 4)


def test_the_head_has_no_speed_to_set(box: Box) -> None:
    with pytest.raises(UsageError, match="the link of head is not shaped; name only node0 to node3"):
        box.rate(10**6, ("head", "node0"))


def test_a_node_is_no_pair_with_itself(box: Box) -> None:
    with pytest.raises(UsageError, match="node1 with itself"):
        box.rate(10**6, ("node1", "node1"))
