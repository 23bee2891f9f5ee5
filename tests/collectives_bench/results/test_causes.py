"""The environment explained: each thing that changes numbers is named with its cost, and an ordinary one is not."""

from typing import Any

import pytest

from muster.collectives_bench.records import Block, Header, HostFacts, Result
from muster.collectives_bench.results.causes import findings
from muster.collectives_bench.results.symptoms import Finding
from support.bench_records import a_block, a_cell, a_header, a_host, a_world

NODES = a_world(2, nodes=2)


def found(*headers: Header, blocks: list[Block] | None = None) -> list[Finding]:
    """Explain some runs."""
    return findings(Result(headers=list(headers), blocks=blocks or []))


def only(*headers: Header, blocks: list[Block] | None = None) -> Finding:
    """Explain some runs of which one thing is to be said."""
    (finding,) = found(*headers, blocks=blocks)
    return finding


def between(**facts: Any) -> Header:
    """Return the header of a run between two nodes that are alike in everything given."""
    ordinary: dict[str, Any] = {"interface": "eth0", "speed_mbit": 1000, "mtu": 1500, "ranks": 1}
    return a_header(*(a_host(node, **{**ordinary, **facts}) for node in (0, 1)), world=NODES)


def launches(p50_us: float, *, count: int = 5, start: int = 0, **more: Any) -> list[Block]:
    """Return launches of alike calls."""
    return [a_block([p50_us] * 7, launch=start + launch, **more) for launch in range(count)]


def test_an_ordinary_machine_has_nothing_to_explain() -> None:
    blocks = launches(100.0, foreign=0.01, first_us=140.0, lateness=[0.97, 1.0])
    assert found(a_header(init_s=0.04), between(), blocks=blocks) == []
    assert found() == []


# Congestion control ---------------------------------------------------------------------------------------------------


def test_bbr_is_named_with_what_it_has_cost_elsewhere_and_how_to_try_another() -> None:
    finding = only(a_header(a_host(congestion_control="bbr")))
    assert "congestion control is bbr" in finding.what
    assert "node0" in finding.evidence
    assert "1.35x" in finding.cost
    assert "seen elsewhere" in finding.cost
    assert "congctl reno" in finding.advice
    assert (finding.factor, finding.measured) == (1.35, False)


def test_congestion_control_of_ranks_on_nccl_or_alone_does_not_matter() -> None:
    assert found(a_header(a_host(congestion_control="bbr"), world=a_world(backend="nccl", device="cuda"))) == []
    assert found(a_header(a_host(congestion_control="bbr", ranks=1), world=a_world(1))) == []


@pytest.mark.parametrize(("names", "wanted"), [(("bbr", "cubic"), "cubic"), (("bbr", "bbr2"), "bbr")])
def test_hosts_that_differ_are_told_of_one_for_all(names: tuple[str, str], wanted: str) -> None:
    hosts = [a_host(node, congestion_control=name) for node, name in enumerate(names)]
    finding = next(each for each in found(a_header(*hosts, world=NODES)) if "differs between hosts" in each.what)
    assert finding.advice.endswith(f"tcp_congestion_control={wanted}")


def test_two_runs_that_differ_in_congestion_control_measure_its_cost() -> None:
    runs = [
        a_header(a_host(congestion_control="bbr"), time=999.0),
        a_header(a_host(congestion_control="reno"), time=1999.0),
    ]
    blocks = launches(135.0) + launches(100.0, start=1000)
    blocks += launches(400.0, cell=a_cell("broadcast")) + launches(200.0, start=1000, cell=a_cell("broadcast"))
    finding = only(*runs, blocks=blocks)
    assert finding.measured
    assert finding.factor == pytest.approx((1.35 * 2.0) ** 0.5)
    assert finding.evidence == "1.64x as long with bbr, over all rows measured with both"
    assert finding.cost == "worse, measured here"
    assert finding.advice.endswith("=reno")


def test_two_runs_that_differ_by_noise_measure_no_cost() -> None:
    runs = [
        a_header(a_host(congestion_control="bbr"), time=999.0),
        a_header(a_host(congestion_control="reno"), time=1999.0),
    ]
    noise = (100.0, 300.0, 150.0, 90.0, 200.0)
    blocks = [a_block([value] * 7, launch=start + i) for start in (0, 1000) for i, value in enumerate(noise)]
    finding = only(*runs, blocks=blocks)
    assert (finding.measured, finding.factor) == (False, None)
    assert finding.cost.startswith("not to be told from noise here")


def test_hosts_that_differ_in_congestion_control_are_told() -> None:
    header = a_header(a_host(0, congestion_control="bbr"), a_host(1, congestion_control="cubic"), world=NODES)
    finding = only(header)
    assert "differs between hosts: bbr, cubic" in finding.what
    assert finding.advice.endswith("=cubic")


# Cores ----------------------------------------------------------------------------------------------------------------


def test_more_ranks_than_cores_are_named_with_what_that_has_cost_elsewhere() -> None:
    finding = only(a_header(a_host(cores=2, ranks=4), world=a_world(4)))
    assert finding.what == "4 ranks share 2 cores"
    assert "4.3 ms with 4 ranks on 2 cores, 0.75 ms with 2" in finding.cost
    assert not finding.measured


def test_more_ranks_than_cores_are_measured_beside_a_world_that_fits() -> None:
    headers = [a_header(a_host(cores=2, ranks=ranks), world=a_world(ranks)) for ranks in (2, 4)]
    small = a_cell(asked_bytes=512 * 2**10)
    blocks = launches(750.0, cell=small) + launches(4300.0, cell=small, world=a_world(4))
    finding = only(*headers, blocks=blocks)
    assert finding.measured
    assert finding.factor == pytest.approx(4300 / 750)
    assert "all_reduce of 512 KB takes 4.3 ms, and 0.75 ms where every rank has a core" in finding.cost


# Interfaces and packets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interface", ["lo", "docker0", "br-1a2b3c", "veth12ab"])
def test_an_interface_that_leads_nowhere_is_named(interface: str) -> None:
    finding = only(between(interface=interface, speed_mbit=None))
    assert interface in finding.what
    assert "94x" in finding.cost
    assert "GLOO_SOCKET_IFNAME" in finding.advice


def test_a_loopback_on_one_machine_is_the_right_one_also_between_pretend_nodes() -> None:
    assert found(a_header(a_host(interface="lo"))) == []
    pretend = [a_host(node, host="laptop", interface="lo", ranks=1) for node in (0, 1)]
    assert found(a_header(*pretend, world=NODES)) == []


def test_a_link_that_is_slower_than_the_others_is_named_with_its_host() -> None:
    hosts = [a_host(node, interface="eth0", speed_mbit=speed) for node, speed in ((0, 10_000), (1, 1000))]
    finding = only(a_header(*hosts, world=NODES))
    assert "1000 and 10000 Mbit/s" in finding.what
    assert "node1" in finding.evidence
    assert finding.factor == 10.0


def test_a_link_that_is_not_used_costs_what_was_measured_against_its_speed() -> None:
    blocks = launches(10 * 2**20 / 0.025e3, world=NODES, cell=a_cell("broadcast", 10 * 2**20))  # 0.025 of 0.125 GB/s
    finding = only(between(), blocks=blocks)
    assert finding.measured
    assert finding.factor == pytest.approx(5.0, rel=0.01)
    assert "0.025 GB/s at best of 0.125" in finding.what


def test_numbers_beyond_the_link_say_that_another_is_used() -> None:
    blocks = launches(10 * 2**20 / 1e3, world=NODES, cell=a_cell("broadcast", 10 * 2**20))  # 1 GB/s
    assert "beyond the link" in only(between(), blocks=blocks).what


def test_a_link_that_is_well_used_is_not_named() -> None:
    blocks = launches(10 * 2**20 / 0.115e3, world=NODES, cell=a_cell("broadcast", 10 * 2**20))
    assert found(between(), blocks=blocks) == []


def test_an_mtu_that_differs_and_one_that_is_small_for_its_link_are_named() -> None:
    hosts = [a_host(node, interface="eth0", speed_mbit=1000, mtu=mtu) for node, mtu in ((0, 1500), (1, 9000))]
    assert "mtu differs: 1500 and 9000" in only(a_header(*hosts, world=NODES)).what
    finding = only(between(speed_mbit=25_000))
    assert "mtu is 1500 on a link of 25000 Mbit/s" in finding.what
    assert finding.cost.startswith("3.6% of the link")


# The rest of what hosts say -------------------------------------------------------------------------------------------


def test_cores_that_save_power_are_named() -> None:
    assert "powersave" in only(a_header(a_host(governor="powersave"))).what


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_SHM_DISABLE"])
def test_a_variable_that_changes_results_is_named(name: str) -> None:
    assert only(a_header(a_host(environment={name: "1"}))).what == f"{name}=1 is set"


def test_variables_without_effect_are_not_named() -> None:
    environment = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    assert found(a_header(a_host(environment=environment))) == []


def test_a_variable_that_differs_between_hosts_is_named_but_not_an_interface() -> None:
    hosts = [
        a_host(node, environment={"NCCL_PROTO": proto, "NCCL_SOCKET_IFNAME": f"eth{node}"})
        for node, proto in ((0, "LL"), (1, "Simple"))
    ]
    finding = only(a_header(*hosts, world=a_world(2, nodes=2, backend="nccl", device="cuda")))
    assert finding.what == "NCCL_PROTO is not the same on all hosts"


def test_a_stall_of_five_seconds_at_the_start_is_a_name_servers() -> None:
    finding = only(a_header(init_s=5.02))
    assert finding.seconds == pytest.approx(5.02)
    assert finding.measured
    assert "RES_OPTIONS='timeout:1 attempts:1'" in finding.advice
    assert found(a_header(init_s=0.8)) == []


# What the numbers say -------------------------------------------------------------------------------------------------


def test_foreign_load_is_named_with_its_cost_from_blocks_with_and_without_it() -> None:
    blocks = launches(100.0, foreign=0.01) + launches(140.0, count=2, start=5, foreign=0.5)
    finding = only(blocks=blocks)
    assert finding.measured
    assert finding.factor == pytest.approx(1.4)
    assert "2 of 7 blocks, up to 50% of a host's time, on node0" in finding.evidence


def test_foreign_load_all_the_time_has_a_cost_from_elsewhere() -> None:
    finding = only(blocks=launches(100.0, foreign=0.5))
    assert "seen elsewhere, above 30 %: a median of 1.24x" in finding.cost
    assert not finding.measured


def test_stolen_cores_are_named() -> None:
    blocks = launches(100.0, load={"foreign": 0.0, "steal": 0.2, "host": "node0"})
    finding = only(blocks=blocks)
    assert "steal" in finding.what
    assert finding.factor == pytest.approx(1.25)


def test_a_rank_that_is_late_in_most_rows_is_named_with_its_host() -> None:
    world = a_world(4, nodes=2)
    late = [0.8, 0.75, 1.0, 0.7]
    blocks = [
        block
        for size in (64, 1024, 2**20)
        for block in launches(100.0, world=world, cell=a_cell(asked_bytes=size), lateness=late)
    ]
    finding = only(a_header(a_host(0), a_host(1), world=world), blocks=blocks)
    assert finding.what == "rank 2 is late (on node1)"
    assert finding.factor == pytest.approx(1.25)
    assert "3 of 3 rows" in finding.evidence


def test_a_rank_that_is_late_in_one_row_of_many_is_not_named() -> None:
    sizes = [64 << power for power in range(4)]
    even = [block for size in sizes for block in launches(100.0, cell=a_cell(asked_bytes=size), lateness=[0.98, 1.0])]
    odd = launches(100.0, cell=a_cell(asked_bytes=2**20), lateness=[1.0, 0.7])
    assert found(blocks=[*even, *odd]) == []


def test_first_calls_that_are_slow_are_told_with_their_seconds() -> None:
    finding = only(blocks=launches(1000.0, first_us=11_000.0))
    assert finding.seconds == pytest.approx(0.01)
    assert "11.0x" in finding.evidence


def test_a_finding_is_one_line_that_says_what_is_known_and_what_to_do() -> None:
    hosts = [HostFacts.model_validate(a_host(node, governor="powersave").model_dump()) for node in range(5)]
    (finding,) = found(a_header(*hosts, world=NODES))
    assert "\n" not in finding.text
    assert "node0, node1, node2 and 2 more" in finding.text
    assert "not measured here" in finding.text
    assert finding.text.endswith("measure again")
