"""Launches on real ranks: what is written when all goes well, and when a launch worker fails in any possible way."""

import pytest

from muster.collectives_bench.records import BenchHeader, Block
from muster.jobs.basics.files import read_lines
from support.bench import blocks, free_port, measure

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

QUICK = {"operation": ["all_reduce", "broadcast", "barrier"], "sizes": ["4K", "64K"], "block_s": 0.02, "launches": 1}


def bench(on_ranks, tmp_path, ranks=3, fault=None, **settings):
    """Run a benchmark; return the exit codes and the blocks."""
    out = tmp_path / "bench.jsonl"
    wanted = {**QUICK, **settings}
    codes = on_ranks(ranks, measure, group=False, settings=wanted, out=str(out), port=free_port(), fault=fault)
    return codes, blocks(out)


def by_operation(found, launch=0):
    """Return {operation: the blocks' states}."""
    states = {}
    for block in found:
        if block["launch"] == launch:
            states.setdefault(block["cell"]["operation"], set()).add(block["state"])
    return states


def test_every_cell_of_every_launch_has_its_block_and_all_are_right(on_ranks, tmp_path):
    codes, found = bench(on_ranks, tmp_path, launches=2)
    assert codes == [0, 0, 0]
    assert {block["state"] for block in found} == {"ok"}
    cells = {(each["launch"], each["cell"]["operation"], each["cell"]["asked_bytes"]) for each in found}
    wanted = [("all_reduce", 4096), ("all_reduce", 65536), ("broadcast", 4096), ("broadcast", 65536), ("barrier", 0)]
    assert cells == {(launch, *cell) for launch in (0, 1) for cell in wanted}
    assert len(found) == len(cells)
    for each in found:
        block = Block.model_validate(each)
        assert block.latency is not None
        assert block.latency.n == len(block.samples_us) >= 5
        assert block.latency.min_us > 0
        assert block.throughput_us is not None
        assert block.cores is not None
        assert block.lateness is not None
        assert len(block.lateness) == 3
        assert block.wrong == 0
        assert block.warm_up_calls >= 2
        assert block.load is not None


def test_the_header_says_what_was_asked_for_and_where_it_ran(on_ranks, tmp_path):
    bench(on_ranks, tmp_path, ranks=2, operation=["barrier"])
    header = BenchHeader.model_validate(next(read_lines(tmp_path / "bench.jsonl")))
    assert (header.name, header.world.ranks, header.world.backend, header.world.device) == ("test", 2, "gloo", "cpu")
    assert header.settings.operation == ["barrier"]
    assert [host.ranks for host in header.hosts] == [2]
    assert header.init_s is not None
    assert header.init_s > 0


def test_one_rank_alone_measures_too(on_ranks, tmp_path):
    codes, found = bench(on_ranks, tmp_path, ranks=1)
    assert codes == [0]
    assert {block["state"] for block in found} == {"ok"}


SAID = {
    "raise": "rank 1: ValueError: a mistake of the rank's own",
    "abort": "rank 1 was killed by SIGABRT",
    "kill": "rank 1 was killed by SIGKILL",
    "exit": "rank 1 ended with code 3",
    "stop": "no progress for 1.5 s (timeout_s): rank 1 is suspended by a signal",
    "loop": "no progress for 1.5 s (timeout_s): rank 1 did not arrive (it is at support/bench.py:",
}


@pytest.mark.parametrize("how", SAID)
def test_a_player_that_fails_is_a_row_with_the_reason_and_the_rest_is_measured(how, on_ranks, tmp_path):
    fault = {"how": how, "operation": "broadcast", "rank": 1}
    late = how in ("stop", "loop")  # these wait it out; what else is measured must not take as long on a busy machine
    codes, found = bench(on_ranks, tmp_path, fault=fault, timeout_s=1.5 if late else 20.0)
    assert codes == [1, 0, 0]
    states = by_operation(found)
    assert states == {
        "all_reduce": {"ok"},
        "broadcast": {"failed"} | {"timeout"} if late else {"failed"},
        "barrier": {"ok"},
    }
    first, skipped = (each for each in found if each["cell"]["operation"] == "broadcast")
    assert first["state"] == ("timeout" if late else "failed")
    assert first["rank"] == 1
    assert first["reason"].startswith(SAID[how])
    assert skipped["reason"].startswith("skipped: broadcast failed at")


def test_a_call_that_ends_and_took_too_long_is_given_up_without_a_culprit(on_ranks, tmp_path):
    """gloo's own time-out is one of each message, and begins anew with every one of them."""
    fault = {"how": "slow", "operation": "broadcast", "rank": -1}
    codes, found = bench(on_ranks, tmp_path, fault=fault, timeout_s=1.0)
    assert codes == [1, 0, 0]
    assert by_operation(found) == {"all_reduce": {"ok"}, "broadcast": {"timeout"}, "barrier": {"ok"}}
    late = [each for each in found if each["state"] == "timeout"]
    assert [each["rank"] for each in late] == [None, None]
    assert all(each["reason"].endswith("s on the slowest rank, longer than 1 s (timeout_s)") for each in late)


def test_gloos_abort_on_a_size_mismatch_is_told_with_its_last_words(on_ranks, tmp_path):
    """Who receives more than it has room for is aborted from a thread of gloo's: no exception, no way to catch it."""
    fault = {"how": "mismatch", "operation": "broadcast", "rank": 0}
    codes, found = bench(on_ranks, tmp_path, ranks=2, fault=fault, timeout_s=20.0)
    assert codes == [1, 0]
    (first,) = (each for each in found if each["rank"] is not None)
    assert first["rank"] == 1
    assert first["reason"].startswith("rank 1 was killed by SIGABRT; last words: ")
    assert "enforce fail" in first["reason"]


def test_an_operation_that_failed_in_two_launches_is_skipped_in_the_others(on_ranks, tmp_path):
    fault = {"how": "kill", "operation": "broadcast", "rank": 2}
    codes, found = bench(on_ranks, tmp_path, fault=fault, launches=4)
    assert codes == [1, 0, 0]
    assert len(found) == 4 * 5
    said = [[each["reason"] for each in found if each["launch"] == launch and each["reason"]] for launch in range(4)]
    assert [len(each) for each in said] == [2] * 4
    assert all("SIGKILL" in each[0] for each in said[:2])
    assert said[2] == said[3] == ["skipped: broadcast failed in 2 launches"] * 2


def test_launches_that_do_not_start_are_tried_twice_and_told_and_then_no_more_are_begun(on_ranks, tmp_path):
    fault = {"how": "raise", "operation": "start", "rank": 1}
    codes, found = bench(on_ranks, tmp_path, fault=fault, launches=3)
    assert codes == [1, 0, 0]
    reason = "rank 1: ValueError: a mistake of the rank's own"
    assert [each["reason"] for each in found] == [f"the launch did not start: {reason}"] * 10 + [
        f"skipped: no launch could start: {reason}"
    ] * 5


def test_the_bytes_on_the_wire_are_counted_in_the_first_launch(on_ranks, tmp_path):
    codes, found = bench(on_ranks, tmp_path, ranks=2, operation=["all_reduce"], sizes=["1M"], launches=2, wire=True)
    assert codes == [0, 0]
    first, second = found
    assert first["wire"]["interfaces"] == ["lo"]
    assert first["wire"]["best_bytes"] == 2 * 2**20
    assert second["wire"] is None


def test_what_would_not_fit_is_refused_on_all_ranks_alike(on_ranks, tmp_path):
    codes, found = bench(on_ranks, tmp_path, ranks=2, operation=["all_reduce"], sizes=["4K", "64G"])
    assert codes == [0, 0]
    large, small = sorted(found, key=lambda each: -each["nbytes"])
    assert (large["state"], small["state"]) == ("refused", "ok")
    assert "memory_share" in large["reason"]


def test_a_rank_whose_own_process_stands_still_is_told_and_all_that_it_keeps_from_being_measured(on_ranks, tmp_path):
    out = tmp_path / "bench.jsonl"
    fault = {"how": "mute launch manager", "operation": "", "rank": 1}
    wanted = {**QUICK, "launches": 3}
    codes = on_ranks(3, measure, group=False, settings=wanted, out=str(out), port=free_port(), fault=fault)
    assert 0 not in codes
    header, *found = read_lines(out)
    assert header["record"] == "header"
    assert [each["state"] for each in found] == ["ok"] * 5 + ["failed"] * 10  # no innocent cell has two blocks
    assert {each["reason"] for each in found[5:]} == {"never began: rank 1 has gone"}
    assert [each["launch"] for each in found] == [0] * 5 + [1] * 5 + [2] * 5
