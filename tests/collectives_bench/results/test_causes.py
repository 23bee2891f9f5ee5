"""The environment explained: each thing that changes numbers is named with its cost, and an ordinary one is not."""

from typing import Any

import pytest

from muster.collectives_bench.records import BenchHeader, Block, HostFacts, Result
from muster.collectives_bench.results.causes import findings
from muster.collectives_bench.results.symptoms import Finding
from support.bench_records import a_block, a_cell, a_header, a_host, a_world

NODES = a_world(2, nodes=2)


def found(*headers: BenchHeader, blocks: list[Block] | None = None) -> list[Finding]:
    """Explain some runs."""
    return findings(Result(headers=list(headers), blocks=blocks or []))


def only(*headers: BenchHeader, blocks: list[Block] | None = None) -> Finding:
    """Explain some runs of which one thing is to be said."""
    (finding,) = found(*headers, blocks=blocks)
    return finding


def between(**facts: Any) -> BenchHeader:
    """Return the header of a run between two nodes that are alike in everything given."""
    ordinary: dict[str, Any] = {"interface": "eth0", "speed_mbit": 1000, "mtu": 1500, "ranks": 1}
    return a_header(*(a_host(node, **{**ordinary, **facts}) for node in (0, 1)), world=NODES)


def launches(p50_us: float, *, count: int = 5, start: int = 0, **more: Any) -> list[Block]:
    """Return launches of alike calls."""
    return [a_block([p50_us] * 7, launch=start + launch, **more) for launch in range(count)]


def over(gb_per_s: float) -> list[Block]:
    """Return launches that move 10 MB between two nodes at a rate."""
    return launches(10 * 2**20 / gb_per_s / 1e3, world=NODES, cell=a_cell("broadcast", 10 * 2**20))


def two(*facts: dict[str, Any], **world: Any) -> BenchHeader:
    """Return the header of a run between two nodes that differ."""
    return a_header(*(a_host(node, **each) for node, each in enumerate(facts)), world=a_world(2, nodes=2, **world))


def sized(*sizes: int, **more: Any) -> list[Block]:
    """Return launches of several sizes."""
    return [block for size in sizes for block in launches(100.0, cell=a_cell(asked_bytes=size), **more)]


SMALL = a_cell(asked_bytes=512 * 2**10)
FOUR = a_world(4, nodes=2)
ETH0 = {"interface": "eth0", "speed_mbit": 1000}
GPUS: dict[str, Any] = {"backend": "nccl"}
TWO_RUNS = [a_header(a_host(congestion_control=name), time=time) for name, time in (("bbr", 999.0), ("reno", 1999.0))]
PROTOCOLS = [{"NCCL_PROTO": proto, "NCCL_SOCKET_IFNAME": f"eth{node}"} for node, proto in enumerate(("LL", "Simple"))]
NOWHERE = ("lo", "docker0", "br-1a2b3c", "veth12ab")

# headers, blocks, what the one finding says, its factor, whether it was measured here
NAMED: dict[str, tuple[list[BenchHeader], list[Block], list[str], float | None, bool]] = {
    "bbr": (
        [a_header(a_host(congestion_control="bbr"))],
        [],
        ["congestion control is bbr", "node0", "1.35x", "seen elsewhere", "congctl reno"],
        1.35,
        False,
    ),
    "more ranks than cores": (
        [a_header(a_host(cores=2, ranks=4), world=a_world(4))],
        [],
        ["4 ranks share 2 cores (", "4.3 ms with 4 ranks on 2 cores, and 0.75 ms with 2 ranks"],
        4.3 / 0.75,
        False,
    ),
    "more ranks than cores, beside a world that fits": (
        [a_header(a_host(cores=2, ranks=ranks), world=a_world(ranks)) for ranks in (2, 4)],
        launches(750.0, cell=SMALL) + launches(4300.0, cell=SMALL, world=a_world(4)),
        ["all_reduce of 512 KB takes 4.3 ms, and 0.75 ms if every rank has a core"],
        4300 / 750,
        True,
    ),
    **{
        f"interface {name}": (
            [between(interface=name, speed_mbit=None)],
            [],
            [name, "94x", "GLOO_SOCKET_IFNAME"],
            None,
            False,
        )
        for name in NOWHERE
    },
    "a link slower than the others": (
        [two({"interface": "eth0", "speed_mbit": 10_000}, ETH0)],
        [],
        ["1000 and 10000 Mbit/s", "node1"],
        10.0,
        False,
    ),
    "a link that is not used": ([between()], over(0.025), ["at best 0.025 of 0.125 GB/s"], 5.0, True),
    "numbers beyond the link": ([between()], over(1.0), ["exceed the link's speed"], None, False),
    "an mtu that differs": (
        [two({**ETH0, "mtu": 1500}, {**ETH0, "mtu": 9000})],
        [],
        ["mtu differs: 1500 and 9000"],
        None,
        False,
    ),
    "a small mtu": (
        [between(speed_mbit=25_000)],
        [],
        ["mtu is 1500 on a link of 25000 Mbit/s", "headers take another 3.6% of the link"],
        1.036,
        False,
    ),
    "cores that save power": ([a_header(a_host(governor="powersave"))], [], ["powersave"], None, False),
    **{
        name: ([a_header(a_host(environment={name: "1"}))], [], [f"{name}=1 is set ("], None, False)
        for name in ("NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_SHM_DISABLE")
    },
    "a variable that differs, and an interface that may": (
        [two(*({"environment": each} for each in PROTOCOLS), **GPUS)],
        [],
        ["NCCL_PROTO differs between hosts ("],
        None,
        False,
    ),
    "a stall at the start": (
        [a_header(init_s=5.02)],
        [],
        ["took 5.0 s", "RES_OPTIONS='timeout:1 attempts:1'"],
        None,
        True,
    ),
    "other programs, by blocks with and without them": (
        [],
        launches(100.0, foreign=0.01) + launches(140.0, count=2, start=5, foreign=0.5),
        ["2 of 7 blocks, up to 50% of a host's time, on node0"],
        1.4,
        True,
    ),
    "other programs all the time": (
        [],
        launches(100.0, foreign=0.5),
        ["seen elsewhere, when they used more than 30 %: 1.24x (median)"],
        None,
        False,
    ),
    "stolen cores": ([], launches(100.0, load={"foreign": 0.0, "steal": 0.2, "host": "node0"}), ["steal"], 1.25, False),
    "a rank that is late in most rows": (
        [a_header(a_host(0), a_host(1), world=FOUR)],
        sized(64, 1024, 2**20, world=FOUR, lateness=[0.8, 0.75, 1.0, 0.7]),
        ["rank 2 is late (on node1) (", "3 of 3 rows"],
        1.25,
        True,
    ),
    "slow first calls": ([], launches(1000.0, first_us=11_000.0), ["11.0x", "0.01 s for the first call"], None, True),
}
ORDINARY: dict[str, tuple[list[BenchHeader], list[Block]]] = {
    "nothing": ([], []),
    "a machine in order": (
        [a_header(init_s=0.04), between()],
        launches(100.0, foreign=0.01, first_us=140.0, lateness=[0.97, 1.0]),
    ),
    "bbr where NCCL speaks": ([a_header(a_host(congestion_control="bbr"), world=a_world(**GPUS))], []),
    "bbr of a rank alone": ([a_header(a_host(congestion_control="bbr", ranks=1), world=a_world(1))], []),
    "a loopback on one machine": ([a_header(a_host(interface="lo"))], []),
    "a loopback between pretend nodes": ([two(*[{"host": "laptop", "interface": "lo", "ranks": 1}] * 2)], []),
    "a link that is well used": ([between()], over(0.115)),
    "variables without effect": (
        [a_header(a_host(environment={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}))],
        [],
    ),
    "a start in time": ([a_header(init_s=0.8)], []),
    "a rank that is late in one row of many": (
        [],
        sized(64, 128, 256, 512, lateness=[0.98, 1.0]) + sized(2**20, lateness=[1.0, 0.7]),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_changes_numbers_is_named_with_its_cost_and_what_to_do(name: str) -> None:
    headers, blocks, said, factor, measured = NAMED[name]
    finding = only(*headers, blocks=blocks)
    assert [each for each in said if each not in finding.text] == [], finding.text
    assert (finding.factor, finding.measured) == (factor and pytest.approx(factor, rel=0.01), measured)


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_as_it_should_be_is_not_named(name: str) -> None:
    headers, blocks = ORDINARY[name]
    assert found(*headers, blocks=blocks) == []


@pytest.mark.parametrize(("names", "wanted"), [(("bbr", "cubic"), "cubic"), (("bbr", "bbr2"), "bbr")])
def test_hosts_that_differ_are_told_of_one_for_all(names: tuple[str, str], wanted: str) -> None:
    hosts = [a_host(node, congestion_control=name) for node, name in enumerate(names)]
    finding = next(each for each in found(a_header(*hosts, world=NODES)) if "differs between hosts" in each.what)
    assert finding.advice.endswith(f"tcp_congestion_control={wanted}")


def test_two_runs_that_differ_in_congestion_control_measure_its_cost() -> None:
    blocks = launches(135.0) + launches(100.0, start=1000)
    blocks += launches(400.0, cell=a_cell("broadcast")) + launches(200.0, start=1000, cell=a_cell("broadcast"))
    finding = only(*TWO_RUNS, blocks=blocks)
    assert finding.measured
    assert finding.factor == pytest.approx((1.35 * 2.0) ** 0.5)
    assert finding.evidence == "calls take 1.64x as long with bbr, over all rows measured with both"
    assert finding.cost == "worse, measured here"
    assert finding.advice.endswith("=reno")


def test_two_runs_that_differ_by_noise_measure_no_cost() -> None:
    noise = (100.0, 300.0, 150.0, 90.0, 200.0)
    blocks = [a_block([value] * 7, launch=start + i) for start in (0, 1000) for i, value in enumerate(noise)]
    finding = only(*TWO_RUNS, blocks=blocks)
    assert (finding.measured, finding.factor) == (False, None)
    assert finding.cost.startswith("cannot be distinguished from noise here")


def test_a_finding_is_one_line_that_says_what_is_known_and_what_to_do() -> None:
    hosts = [HostFacts.model_validate(a_host(node, governor="powersave").model_dump()) for node in range(5)]
    (finding,) = found(a_header(*hosts, world=NODES))
    assert "\n" not in finding.text
    assert "node0, node1, node2 and 2 more" in finding.text
    assert "not measured here" in finding.text
    assert finding.text.endswith("measure again")
