"""The wire audit: counters read as the kernel writes them, headers taken off, and deviations named."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from muster.collectives_bench.catalog import OPERATIONS, actual_bytes
from muster.collectives_bench.ranks import wire
from muster.collectives_bench.ranks.operations import prepare
from muster.collectives_bench.ranks.wire import WireCounter, audit, interfaces_of
from muster.collectives_bench.records import BenchCell
from muster.jobs.world.world import World

MB = 2**20


class Kernel:
    """/proc/net/dev and /proc/net/snmp of a host with two interfaces, of which a test says what they have sent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dev, self.snmp = folder / "dev", folder / "snmp"
        monkeypatch.setattr(wire, "COUNTERS", self.dev)
        monkeypatch.setattr(wire, "PROTOCOLS", self.snmp)
        monkeypatch.setattr(wire, "mtu", lambda name: 1500)
        monkeypatch.setattr(wire, "header_bytes", lambda ipv6=False: 66)
        self.sent()

    def sent(self, lo: tuple[int, int] = (0, 0), eth1: tuple[int, int] = (0, 0), again: int = 0) -> None:
        """Write (bytes, packets) of both interfaces, and the segments that were sent again."""
        head = "Inter-|   Receive      |  Transmit\n face |bytes packets errs |bytes packets errs\n"
        rows = "".join(
            f"{name:>6}: 7 7 0 0 0 0 0 0 {nbytes} {packets} 0 0 0 0 0 0\n"
            for name, (nbytes, packets) in (("lo", lo), ("eth1", eth1))
        )
        self.dev.write_text(head + rows)
        self.snmp.write_text(f"Ip: A B\nIp: 1 2\nTcp: InSegs RetransSegs OutRsts\nTcp: 5 {again} 0\n")


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    return Kernel(tmp_path, monkeypatch)


def test_headers_are_taken_off_and_acknowledgements_count_as_nothing(kernel):
    counter = WireCounter(["lo"])
    kernel.sent(lo=(1000, 10))
    counter.start()
    kernel.sent(lo=(1000 + 2 * (65536 + 66) + 5 * 66, 10 + 2 + 5))
    assert counter.sent() == 2 * 65536


def test_only_the_interfaces_that_were_named_count(kernel):
    counter = WireCounter(["eth1"])
    counter.start()
    kernel.sent(lo=(10**9, 10**6), eth1=(1514, 1))
    assert counter.sent() == 1448
    both = WireCounter(["lo", "eth1", "eth1"])
    both.start()
    kernel.sent(lo=(10**9 + 166, 10**6 + 1), eth1=(1514 + 166, 2))
    assert both.sent() == 200


def test_what_was_sent_again_is_counted_once(kernel):
    counter = WireCounter(["lo", "eth1"])
    counter.start()
    kernel.sent(eth1=(12 * 1514, 12), again=2)
    assert counter.sent() == 10 * 1448


def test_of_a_loopback_what_was_sent_again_is_told_for_it_cannot_be_counted_off(kernel):
    counter = WireCounter(["lo"])
    counter.start()
    kernel.sent(lo=(2 * 1066, 2), again=1)
    assert (counter.sent(), counter.sent_again()) == (2000, 1)
    card = WireCounter(["lo", "eth1"])
    card.start()
    kernel.sent(lo=(2 * 1066, 2), again=3)
    assert card.sent_again() == 0


def test_ranks_of_one_host_use_the_loopback_and_others_their_interface_too():
    assert interfaces_of("eth1", alone=True) == ["lo"]
    assert interfaces_of("eth1", alone=False) == ["eth1", "lo"]
    assert interfaces_of("lo", alone=False) == interfaces_of("", alone=False) == ["lo"]


@pytest.mark.parametrize(("stamps", "wanted"), [("1", 66), ("0", 54)])
def test_headers_are_those_that_the_kernel_sends(tmp_path, monkeypatch, stamps, wanted):
    (tmp_path / "stamps").write_text(f"{stamps}\n")
    monkeypatch.setattr(wire, "TIMESTAMPS", tmp_path / "stamps")
    assert wire.header_bytes() == wanted


def test_a_window_moves_some_megabytes_in_a_bounded_number_of_calls():
    assert [wire.calls_of(nbytes) for nbytes in (0, 1, MB, 8 * MB, 2**30)] == [64, 64, 8, 1, 1]


# What others send while nothing of ours is sent is counted off: then too little seems to have been sent.
TRIES = 6


def is_at_least_known(counted: dict) -> bool:
    return counted["sent_bytes"] >= 0.99 * counted["known_bytes"]


def audited(world: World, operations: list[str], asked: int) -> list:
    control = dist.new_group(backend="gloo")
    counter = WireCounter(["lo"]) if world.rank == 0 else None
    found = []
    for operation in operations:
        cell = BenchCell(operation=operation, dtype="fp32", asked_bytes=asked, place=OPERATIONS[operation].places[0])
        nbytes = actual_bytes(OPERATIONS[operation], asked, world.size, "fp32")
        call = prepare(cell, nbytes, dist.group.WORLD, torch.device("cpu"))
        call.fill()
        call.run()
        for _ in range(TRIES):
            counted = audit(call.run, cell, nbytes, counter=counter, control=control)
            if is_at_least_known(counted.model_dump()):  # all ranks have the same numbers, and go on together
                break
        found.append([operation, counted.model_dump()])
    return found


@pytest.mark.ranks
def test_real_calls_send_at_least_what_is_known_of_them_and_all_ranks_hear_the_same(on_ranks):
    """At least: other programs of this machine may use its loopback; the exact bytes are counted in a namespace."""
    first, second = on_ranks(2, audited, operations=["reduce_scatter", "reduce"], asked=4 * MB)
    for (operation, one), (_, other) in zip(first, second, strict=True):
        assert {**one, "interfaces": []} == {**other, "interfaces": []}
        assert one["interfaces"] == ["lo"]
        assert is_at_least_known(one), operation
        assert one["calls"] == -(-8 * MB // int(one["known_bytes"]))
