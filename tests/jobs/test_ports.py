"""Ports that are ours before anybody hears of them: which are candidates, and that they are really bound."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.machine import ports

LOOPBACK = "127.0.0.1"
RANGE = st.tuples(st.integers(1, 65535), st.integers(1, 65535)).map(lambda pair: (min(pair), max(pair)))


@given(ephemeral=RANGE, reserved=st.lists(RANGE, max_size=4))
def test_a_candidate_is_high_and_in_nobodys_range(ephemeral: tuple[int, int], reserved: list[tuple[int, int]]) -> None:
    taken = {port for first, last in (ephemeral, *reserved) for port in range(first, last + 1)}
    assert set(ports.candidates(ephemeral, reserved)) == set(range(20_000, 65_536)) - taken


def test_linuxs_own_range_leaves_thousands() -> None:
    assert len(ports.candidates(ports.EPHEMERAL, [])) == 12_768 + 4_536


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /proc/sys/net/ipv4."""
    monkeypatch.setattr(ports, "KERNEL", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("reserved", "ranges"),
    [
        ("\n", []),
        ("8080\n", [(8080, 8080)]),
        ("8080,9000-9010,61000-61001\n", [(8080, 8080), (9000, 9010), (61000, 61001)]),
    ],
)
def test_the_kernels_ranges_are_read_as_it_writes_them(
    kernel: Path, reserved: str, ranges: list[tuple[int, int]]
) -> None:
    (kernel / "ip_local_port_range").write_text("10000\t20999\n")
    (kernel / "ip_local_reserved_ports").write_text(reserved)
    assert ports.kernel_ranges() == ((10_000, 20_999), ranges)


def test_where_the_kernel_does_not_say_linuxs_default_holds(kernel: Path) -> None:
    assert ports.kernel_ranges() == (ports.EPHEMERAL, [])


def test_a_bound_port_listens_and_is_none_that_the_kernel_hands_out() -> None:
    ephemeral, reserved = ports.kernel_ranges()
    for _ in range(20):
        with ports.bind(LOOPBACK, backlog=7) as listening:
            address, port = listening.getsockname()
            assert address == LOOPBACK
            assert port in ports.candidates(ephemeral, reserved)
            with socket.create_connection((LOOPBACK, port), timeout=10):
                pass  # it waits in the backlog


def test_two_never_have_the_same_port() -> None:
    """Also of one address and all: a port of every address is nobody's on a single one."""
    held = [ports.bind(address, backlog=1) for address in ("", LOOPBACK) for _ in range(20)]
    numbers = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    assert len(set(numbers)) == len(numbers)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Two candidates, both taken by somebody else."""
    taken = [socket.create_server((LOOPBACK, 0)) for _ in range(2)]
    monkeypatch.setattr(ports, "candidates", lambda *_: [each.getsockname()[1] for each in taken])
    yield taken
    for each in taken:
        each.close()


def test_a_taken_port_is_passed_over(few: list[socket.socket]) -> None:
    free = few.pop()
    number = free.getsockname()[1]
    names = [few[0].getsockname()[1], number]
    free.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports, "candidates", lambda *_: names)
        with ports.bind(LOOPBACK, backlog=1) as listening:
            assert listening.getsockname()[1] == number


def test_when_all_are_taken_the_kernel_chooses_one(few: list[socket.socket]) -> None:
    with ports.bind(LOOPBACK, backlog=1) as listening:
        assert listening.getsockname()[1] not in {each.getsockname()[1] for each in few}


def test_an_address_of_nobody_is_the_systems_error() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        ports.bind("203.0.113.1", backlog=1)  # RFC 5737: documentation only
