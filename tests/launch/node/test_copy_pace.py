"""When copies are sent: the time that a node has, and the traffic of other programs."""

import socket
from pathlib import Path

import pytest

from muster.launch.node import copy_pace
from muster.launch.node.copy_pace import LONGEST_S, LONGEST_WAIT_S, SPREAD, CopyPace, OtherTraffic

HEAD = "Inter-|   Receive\n face |bytes packets\n"


def window_s(interval_s: float) -> float:
    """Return how long after the first shard of the second checkpoint a sender may still wait."""
    pace = CopyPace()
    for name, at in (("one", 100.0), ("two", 100.0 + interval_s)):
        pace.shard(name, at)
        pace.shard(name, at)
        if name == "one":
            assert not pace.may_wait(at, at)  # nothing is known about the time between two copies
    begun, waited_s = 100.0 + interval_s, 0.0
    while pace.may_wait(begun + waited_s, begun + waited_s):
        waited_s += 0.01
    return waited_s


@pytest.mark.parametrize("interval_s", [0.5, 2.0, 65.0])
def test_a_copy_may_wait_for_a_part_of_the_time_until_the_next(interval_s: float) -> None:
    assert window_s(interval_s) == pytest.approx(SPREAD * interval_s, abs=0.02)


def test_a_copy_ends_before_its_sender_and_its_receiver_give_up() -> None:
    assert window_s(7200.0) == pytest.approx(LONGEST_S, abs=0.2)
    pace = CopyPace()
    for name, at in (("one", 0.0), ("two", 60.0)):
        pace.shard(name, at)
    assert pace.may_wait(60.0, 60.9)
    assert not pace.may_wait(60.0, 60.0 + LONGEST_WAIT_S)


def test_the_bytes_of_copies_are_no_traffic_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    monkeypatch.setattr(copy_pace, "DEVICES", str(devices))

    def sent(count: int) -> None:
        counts = f"7 1 0 0 0 0 0 0 {count:>9} 1 0 0 0 0 0 0\n"
        devices.write_text(f"{HEAD}    lo: {'9' * 9} 1 0 0 0 0 0 0 999999999 1 0 0 0 0 0 0\n  eth0:{counts}")

    sent(1000)
    traffic = OtherTraffic()
    traffic.is_quiet(1.0)
    sent(10_000)
    assert traffic.is_quiet(1.01)
    sent(10_010_000)
    assert not traffic.is_quiet(1.02)
    traffic.sending(10_000_000)
    assert traffic.is_quiet(1.03)
    for count in (13_000_000, 20_500_000):  # the devices send what is in the buffers
        sent(count)
        assert traffic.is_quiet(1.04)
    sent(31_000_000)
    assert not traffic.is_quiet(1.05)


def test_the_traffic_of_this_host_can_be_read() -> None:
    traffic = OtherTraffic()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(bytes(1 << 16))  # over loopback, which no other host shares
    assert traffic._total >= 0
