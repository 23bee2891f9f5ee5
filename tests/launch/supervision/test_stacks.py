"""Who did not come to where the others wait: from stacks as faulthandler writes them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from muster.launch.node.dumping import bounded
from muster.launch.supervision.stacks import FRAME, Frame, absent, line_of, threads

TORCH = "/venv/lib/python3.11/site-packages/torch"
ALL_REDUCE = [
    f"{TORCH}/distributed/distributed_c10d.py:3006 all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    "/repo/ddp/all_reduce.py:23 _mean",
    "/repo/jobs/train/engine.py:88 train_step",
]
BARRIER = [f"{TORCH}/distributed/distributed_c10d.py:5024 barrier", "/repo/jobs/saving/saver.py:40 finish"]
BACKWARD = [f"{TORCH}/autograd/graph.py:857 _engine_run_backward", "/repo/jobs/train/engine.py:80 backward"]
READS = ["/repo/jobs/train/data/loading.py:31 read", "/repo/jobs/train/loop.py:70 run_steps"]
SLEEPS = ["/home/her/model.py:12 forward"]
QUEUE = ["/usr/lib/python3.11/threading.py:327 wait", "/usr/lib/python3.11/queue.py:171 get"]


def block(*places: str, current: bool = False) -> list[str]:
    """A thread as faulthandler writes it, from "file:line function"."""
    head = f"{'Current thread' if current else 'Thread'} 0x00007f2a9c1ff6c0 (most recent call first):"
    frames = []
    for place in places:
        where, function = place.split(" ")
        file, line = where.rsplit(":", 1)
        frames.append(f'  File "{file}", line {line} in {function}')
    return [head, *frames]


def dump(*stacks: Sequence[str], state: str = "S", steps: int | None = 4) -> dict[str, Any]:
    """What an agent tells of a rank; the last stack is the main thread's."""
    lines = [line for stack in stacks for line in block(*stack)]
    return {"state": state, "lines": lines, "steps": steps, "phase": "run"}


def no_source(file: str, line: int) -> str:
    return ""


def blamed(*dumps: dict[str, Any]) -> tuple[int, ...]:
    return absent(dict(enumerate(dumps)), no_source).ranks


def test_a_rank_that_is_elsewhere_than_in_the_collective_is_named_with_its_line() -> None:
    found = absent({0: dump(ALL_REDUCE), 1: dump(SLEEPS), 2: dump(ALL_REDUCE)}, no_source)
    assert found.ranks == (1,)
    assert found.text == (
        "rank 1 did not reach all_reduce (repo/ddp/all_reduce.py:23 _mean), where 2 wait: "
        "it is at home/her/model.py:12 forward"
    )


def test_a_rank_that_stands_still_is_to_blame_wherever_it_is() -> None:
    found = absent({0: dump(ALL_REDUCE), 1: dump(ALL_REDUCE, state="T"), 2: dump(READS)}, no_source)
    assert found.ranks == (1,)
    assert found.text.startswith("rank 1 is suspended by a signal: it waits in all_reduce at ")


@pytest.mark.parametrize("state", ["t", "T"])
def test_one_that_stands_still_and_gives_no_stack_is_named_too(state: str) -> None:
    found = absent({0: dump(ALL_REDUCE), 1: {"state": state, "lines": []}}, no_source)
    assert (found.ranks, found.text) == (
        (1,),
        f"rank 1 is suspended by a signal: it wrote no stack (process state {state})",
    )


def test_a_rank_that_cannot_even_write_its_stack_did_not_come() -> None:
    """It waits for a disk."""
    found = absent({0: dump(ALL_REDUCE), 1: {"state": "D", "lines": []}}, no_source)
    assert found.ranks == (1,)
    assert found.text.endswith("it wrote no stack (process state D)")


def test_threads_beside_the_main_one_do_not_matter() -> None:
    assert blamed(dump(QUEUE, ALL_REDUCE), dump(ALL_REDUCE, READS), dump(QUEUE, QUEUE, ALL_REDUCE)) == (1,)


def test_in_a_backward_on_a_gpu_the_hooks_of_its_thread_count() -> None:
    assert blamed(dump(ALL_REDUCE, BACKWARD), dump(ALL_REDUCE, BACKWARD), dump(BARRIER, BACKWARD)) == (2,)


def test_a_backward_may_wait_as_well_as_compute() -> None:
    assert blamed(dump(BACKWARD), dump(READS), dump(BACKWARD)) == (1,)
    assert blamed(dump(BACKWARD), dump(BACKWARD)) == ()


def test_a_call_into_c_is_told_by_the_text_of_its_line() -> None:
    text = {("/repo/jobs/train/metrics.py", 51): "    return loss.item()\n", ("/her/a.py", 3): "    work.wait()\n"}
    source = lambda file, line: text.get((file, line), "")  # noqa: E731
    waits = dump(["/repo/jobs/train/metrics.py:51 record"])
    dumps = {0: waits, 1: dump(READS), 2: waits, 3: dump(["/her/a.py:3 f"])}
    assert absent(dumps, source).ranks == (1,)
    assert "item (repo/jobs/train/metrics.py:51 record)" not in absent(dumps, no_source).text
    assert "did not reach item (jobs/train/metrics.py:51 record), where 2 wait" in absent(dumps, source).text


def test_when_all_wait_those_that_wait_elsewhere_are_named() -> None:
    found = absent({0: dump(ALL_REDUCE), 1: dump(BARRIER), 2: dump(ALL_REDUCE)}, no_source)
    assert found.ranks == (1,)
    assert found.text.startswith("rank 1 waits in a different place than the others: it waits in barrier at ")
    assert "; another rank: it waits in all_reduce at " in found.text
    assert found.text.endswith(" after 4 steps")


def test_when_all_wait_in_one_line_the_number_of_steps_tells_who_passed_one_by() -> None:
    assert blamed(dump(ALL_REDUCE), dump(ALL_REDUCE, steps=5), dump(ALL_REDUCE)) == (1,)
    assert blamed(dump(ALL_REDUCE, steps=5), dump(ALL_REDUCE)) == (0,)  # of two, the one that is ahead


def test_when_all_wait_in_one_place_nobody_is_to_blame() -> None:
    found = absent({0: dump(ALL_REDUCE), 1: dump(ALL_REDUCE)}, no_source)
    assert found.ranks == ()
    assert found.text == (
        "all 2 ranks report the same place: it waits in all_reduce at repo/ddp/all_reduce.py:23 _mean; "
        "check the network and the devices"
    )


def test_two_that_wait_for_different_things_are_both_told_and_neither_is_blamed() -> None:
    found = absent({0: dump(ALL_REDUCE), 1: dump(BARRIER)}, no_source)
    assert found.ranks == ()
    assert "all_reduce" in found.text
    assert "barrier" in found.text


def test_when_none_waits_the_odd_one_is_named() -> None:
    assert blamed(dump(READS), dump(READS), dump(SLEEPS)) == (2,)
    assert blamed(dump(READS), dump(SLEEPS)) == ()


def test_a_single_rank_is_the_one_that_hangs() -> None:
    found = absent({0: dump(SLEEPS)}, no_source)
    assert (found.ranks, found.text) == (
        (0,),
        "rank 0 is the only rank: it is at home/her/model.py:12 forward",
    )


def test_without_any_answer_nothing_is_claimed() -> None:
    assert absent({}, no_source).ranks == ()
    assert absent({}, no_source).text == "no rank sent its stacks"


def test_of_many_absent_ranks_four_are_described() -> None:
    found = absent({rank: dump(SLEEPS) if rank else dump(ALL_REDUCE) for rank in range(9)}, no_source)
    assert found.ranks == tuple(range(1, 9))
    assert found.text.count("did not reach") == 4
    assert found.text.endswith("; and 4 more")


def test_lines_that_are_no_stack_are_passed_over() -> None:
    lines = [
        "loss is nan",
        *block(*QUEUE),
        "",
        *block("/a/b.py:??? <module>", current=True),
        "  ...",
        "  Garbage-collecting",
        "Traceback (most recent call last):",
    ]
    assert threads(lines) == [
        [Frame(QUEUE[0].split(":")[0], 327, "wait"), Frame("/usr/lib/python3.11/queue.py", 171, "get")],
        [Frame("/a/b.py", 0, "<module>")],
    ]
    assert threads(["Thread 0x00007f2a9c1ff6c0 [worker] (most recent call first):", *block("/a.py:1 f")[1:]])
    assert threads(["Current thread 0x00007f2a9c1ff6c0 (most recent call first):", "  <no Python frame>"]) == []


def test_of_too_many_lines_the_main_thread_and_the_innermost_calls_are_kept() -> None:
    deep = [f"/a.py:{line} f" for line in range(300)]
    lines = [*block(*deep), "noise", *block(*deep[:250], current=True)]
    kept = bounded(lines, most_lines=100)
    assert len(kept) == 100
    assert kept[0].startswith("Current thread")
    assert threads(kept) == [threads(block(*deep[:99]))[0]]
    both = bounded([*block(*deep[:150]), *block(*deep[:40])], most_lines=100)
    assert [len(stack) for stack in threads(both)] == [58, 40]
    few = bounded(lines, most_bytes=1000)
    assert sum(len(line) + 1 for line in few) <= 1000
    assert FRAME.match(few[-1])


def test_the_rank_parent_below_a_rank_is_left_out() -> None:
    """A rank is a fork of it, and so its stack goes on into the rank parent's."""
    rank_parent = ["/repo/jobs/node/rank_start.py:47 become", "/repo/jobs/node/rank_parent.py:141 _start"]
    lines = block(*QUEUE, "/repo/jobs/node/rank_start.py:61 _call", *rank_parent)
    assert bounded([*lines, *block(*SLEEPS)]) == [*lines[: -len(rank_parent)], *block(*SLEEPS)]


def test_only_source_files_are_read_whatever_a_node_names(tmp_path: Path) -> None:
    """A node writes the stacks: a pipe that it names would be waited for, and a device read for ever."""
    source = tmp_path / "job.py"
    source.write_text("loss.item()\n")
    os.mkfifo(tmp_path / "pipe.py")
    secret = tmp_path / "secret"
    secret.write_text("x.wait(\n")
    named = (source, tmp_path / "pipe.py", secret, Path("/dev/zero"), tmp_path / "gone.py")
    assert [line_of(str(path), 1) for path in named] == ["loss.item()\n", "", "", "", ""]
