"""The table: one line a row under nccl-tests' headings, states in place of numbers, and a verdict."""

from muster.collectives_bench.records import BenchCell, BenchMemory, ForeignLoad, HostFacts, Result
from muster.collectives_bench.results import audit, backends, matrix, table
from muster.collectives_bench.results.rows import rows_of
from support.measured import block, header, pairs, result, settings, wire, world

CELL = BenchCell(operation="all_reduce", dtype="fp32", asked_bytes=1 << 20, place="in")


def test_a_section_has_a_name_row_a_unit_row_and_fixed_columns() -> None:
    lines = table.lines(rows_of(result(settings(operation=["all_reduce", "broadcast"]))))
    assert lines[1] == "# all_reduce: every rank gets the sum of all · 2 nodes x 1 rank, gloo on cpu"
    names, units, first, second = lines[2:6]
    shown = "# size count type redop root place time +- min p99 b2b algbw busbw #wrong n launches flags"
    assert " ".join(names.split()) == shown
    assert " ".join(units.split()) == "# (B) (elements) (us) (%) (us) (us) (us) (GB/s) (GB/s)"
    assert " ".join(first.split()) == "1048576 262144 fp32 sum - in 1160 1.0 1034 1740 1044 0.904 0.904 0 60 3"
    assert " ".join(second.split()) == "4194304 1048576 fp32 sum - in 4337 1.0 3865 6506 3904 0.967 0.967 0 60 3"
    for name in ("size", "count", "time", "algbw", "busbw", "launches"):
        end = names.index(f" {name}") + len(name) + 1
        assert first[end - 1].isdigit()
        assert first[end : end + 1] in ("", " ")
    assert lines[7].startswith("# broadcast: ")
    assert lines[10].split()[3:5] == ["-", "0"]


def test_a_row_that_failed_shows_its_state_and_reason_in_place_of_numbers() -> None:
    reason = "rank 1 ended by SIGABRT"
    made = [block(world(), CELL, launch, state="failed", reason=reason, rank=1) for launch in range(3)]
    rows = rows_of(Result(blocks=made))
    assert table.lines(rows)[-1].split(maxsplit=6)[-1] == f"failed: {reason}"
    assert table.footer(rows) == [
        "# wrong values: 0 in 0 checked rows",
        "# failed: 1 of 1 row: all_reduce (1 failed)",
    ]
    assert table.is_failed(rows)


def test_one_failed_launch_of_three_leaves_the_numbers_of_two() -> None:
    made = [block(world(), CELL, launch) for launch in range(2)]
    rows = rows_of(Result(blocks=[*made, block(world(), CELL, 2, state="timeout", reason="stalled")]))
    line = table.lines(rows)[-1]
    assert line.split()[15] == "2/3"
    assert line.endswith("timeout: stalled (1 of 3 launches)")
    assert table.is_failed(rows)


def test_wrong_values_are_counted_and_fail_the_verdict() -> None:
    made = [block(world(), CELL, 0), block(world(), CELL, 1, state="wrong", wrong=7, reason="7 of 262144 elements")]
    rows = rows_of(Result(blocks=made))
    assert "# wrong values: 7 in 1 checked row" in table.footer(rows)
    assert table.is_failed(rows)
    assert table.lines(rows)[-1].split()[13] == "7"


def test_what_a_backend_lacks_is_left_out_and_is_no_failure() -> None:
    gather = BenchCell(operation="gather", dtype="fp32", asked_bytes=1 << 20, place="out")
    rows = rows_of(
        Result(blocks=[block(world(), CELL), block(world(), gather, state="unsupported", reason="no gather")])
    )
    assert "# not measured: 1 of 2 rows: gather (1 unsupported)" in table.footer(rows)
    assert not table.is_failed(rows)


def test_a_barrier_has_a_time_and_neither_size_nor_bandwidth() -> None:
    cell = BenchCell(operation="barrier", dtype="fp32", asked_bytes=0, place="in")
    made = [block(world(), cell, launch, wrong=None) for launch in range(3)]
    line = table.lines(rows_of(Result(blocks=made)))[-1]
    assert " ".join(line.split()) == "- - - - - in 101.0 1.0 90.00 151.5 90.90 - - - 60 3"


def test_the_worst_flagged_rows_are_named_in_the_footer() -> None:
    cells = [
        BenchCell(operation="all_reduce", dtype="fp32", asked_bytes=size << 20, place="in") for size in range(1, 8)
    ]
    made = [
        block(world(), cell, launch, load=ForeignLoad(foreign=0.4, steal=0.0)) for cell in cells for launch in range(2)
    ]
    lines = [line for line in table.footer(rows_of(Result(blocks=made))) if "flag" in line]
    assert len(lines) == table.MOST_FLAGGED + 1
    assert "other programs used up to 40% of the CPUs (2 of 2 launches)" in lines[0]
    assert lines[-1] == "# and 2 other rows with flags"


def test_the_header_says_versions_world_settings_and_one_line_for_each_host() -> None:
    made = header(world(2, 3), settings(check=False))
    gpus = HostFacts(node=1, host="n1", cores=64, ranks=3, gpus=["H200"] * 4, environment={"NCCL_ALGO": "Ring"})
    lines = table.header(made.model_copy(update={"nccl": "2.28", "hosts": [made.hosts[0], gpus]}))
    assert lines == [
        "# demo: 2 nodes x 3 ranks, gloo on cpu · torch 2.13.0 · nccl 2.28 · 1970-01-01 00:00:01 UTC",
        "# settings: launches 3, block 0.25 s, timeout 30 s, precision 0.03, seed 0, check no",
        "# node 0 n0: 3 ranks on 2 cores, EPYC, 8 GB, eth0 mtu 1500 cubic, Linux 6.1",
        "# node 1 n1: 3 ranks on 64 cores, 4 x H200, NCCL_ALGO=Ring",
        "# creating the group took 0.04 s (first launch)",
    ]


def test_values_have_about_four_digits_and_no_powers_of_ten() -> None:
    values = (0.00123, 0.0, 0.5, 12.345, 123.45, 1234.5, 98765432.1, None)
    assert [table.number(value) for value in values] == [
        "0.0012",
        "0.00",
        "0.500",
        "12.35",
        "123.5",
        "1234",
        "98765432",
        "-",
    ]


def test_pairs_are_a_matrix_of_bandwidth_and_one_of_latency_with_the_hosts() -> None:
    lines = matrix.lines(pairs(3, slow_node=2))
    assert "# node 2: n2" in lines
    at = lines.index("# bandwidth from the row's node to the column's (GB/s)")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["#", "node", "0", "1", "2"],
        ["0", ".", "0.995", "0.246"],
        ["1", "0.995", ".", "0.248"],
    ]
    at = lines.index("# latency of 8 bytes, one way (us)")
    assert float(lines[at + 4].split()[1]) > 200.0


def test_of_many_nodes_the_ends_are_named_instead_of_a_matrix_that_fits_no_screen() -> None:
    lines = matrix.lines(pairs(20, slow_node=7, launches=1))
    slowest = [line for line in lines if line.startswith("# slowest: ")]
    assert len(slowest) == matrix.ENDS
    assert all("node 7" in line for line in slowest)
    assert max(map(len, lines)) < 100


def test_a_pair_that_failed_is_said() -> None:
    made = pairs(2, launches=1)[0].model_copy(update={"state": "failed", "reason": "no answer", "there": None})
    lines = matrix.lines([made])
    assert lines[-1] == "# nodes 0 and 1, launch 1: failed: no answer"
    assert matrix.lines([]) == []


def test_bytes_on_the_wire_are_held_against_both_formulas() -> None:
    names, size = ("all_reduce", "reduce_scatter", "reduce"), float(4 << 20)
    cells = [BenchCell(operation=name, dtype="fp32", asked_bytes=4 << 20, place="in") for name in names]
    cells.append(BenchCell(operation="all_reduce", dtype="fp32", asked_bytes=4096, place="in"))
    found = (
        wire(2.002 * size, 2 * size, 2 * size),
        wire(2 * size, 2 * size, size),
        wire(2.34 * size, 1.5 * size, size),
        wire(9000.0, 8192.0, 8192.0),
    )
    rows = rows_of(Result(blocks=[block(world(), cell, wire=each) for cell, each in zip(cells, found, strict=True)]))
    lines = audit.lines(rows)
    assert lines[1] == "# bytes that all ranks together sent (eth0), divided by S · 2 nodes x 1 rank, gloo on cpu"
    told = {tuple(line.split()[:3]): " ".join(line.split()[4:]) for line in lines[4:]}
    assert told["all_reduce", "4", "MB"] == "2.00 2.00 2.00 +0.1 as the formula"
    assert told["all_reduce", "4", "KB"].endswith("not compared below 1 MB, where headers matter")
    assert told["reduce_scatter", "4", "MB"].startswith("2.00 2.00 1.00 +0.0 reduce_scatter moves 2.00 x the best")
    assert told["reduce", "4", "MB"].endswith(
        "+56.0 reduce moves 2.34 x the best algorithm's bytes; 1.50 x was expected"
    )
    assert audit.lines(rows_of(Result(blocks=[block(world(), CELL)]))) == []


def test_hidden_memory_is_told_of_each_operation_at_its_largest_size() -> None:
    size, memories = 1 << 20, {1: None, 4: 4 << 20, 8: 8 << 20}
    made = []
    for count, hidden in memories.items():
        cell = BenchCell(operation="all_gather", dtype="fp32", asked_bytes=count * size, place="out")
        memory = BenchMemory(buffers_bytes=count * size * 3 // 2, hidden_bytes=hidden)
        made.append(block(world(), cell, memory=memory))
    lines = audit.memory(rows_of(Result(blocks=made)))
    assert [line.split() for line in lines[4:]] == [["all_gather", "8", "MB", "out", "1.50", "1.00"]]
    assert audit.memory(rows_of(Result(blocks=made[:1]))) == []


def test_two_backends_stand_in_one_table_with_the_ratio_of_their_times() -> None:
    gloo, nccl = world(1, 2), world(1, 2).model_copy(update={"backend": "nccl", "device": "cuda"})
    rows = rows_of(result(settings(), [gloo, nccl]))
    lines = backends.lines(rows)
    assert " ".join(lines[1].split()) == "# 1 node x 2 ranks gloo on cpu nccl on cuda nccl / gloo"
    assert " ".join(lines[2].split()) == "# cell time (us) busbw time (us) busbw time"
    assert [line.split("  ")[0] for line in lines[3:]] == ["# all_reduce 1 MB fp32 in", "# all_reduce 4 MB fp32 in"]
    first = [row for row in rows if row.cell == rows[0].cell]
    assert float(lines[3].split()[-1]) == round(first[1].p50_us / first[0].p50_us, 2)
    assert len({len(line) for line in lines[1:]}) == 1
    assert backends.lines([row for row in rows if row.world == gloo]) == []
