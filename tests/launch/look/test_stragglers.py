"""Which ranks are called slow, by the decision alone; and what status, watch, why and compare show of it."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from muster.jobs.spec.modes import Parallel
from muster.launch.common.fields import typed
from muster.launch.records.event_texts import lines_of
from muster.launch.records.paces import PaceWatch, StepRow, newest_steps, pace_of
from muster.launch.records.runrows import read_stragglers
from muster.launch.records.stragglers import (
    PARTS,
    WINDOWS,
    Place,
    Straggler,
    Window,
    persistent,
    stragglers_of,
    suspects_in,
    teams_of,
)

Rate = Callable[[int], float]


def a_window(
    ranks: int,
    slow: Rate,
    *,
    chance: random.Random,
    noise: float = 0.05,
    samples: Rate = lambda rank: 4.0,
    work_s: Rate = lambda rank: 0.06,
    waiting: bool = True,
) -> Window:
    """Twenty steps of ranks that wait for the slowest of them. `slow`: the factor of a rank's own time."""
    rows: dict[int, list[StepRow]] = {rank: [] for rank in range(ranks)}
    for step in range(1, 21):
        own = {rank: slow(rank) * work_s(rank) * samples(rank) / 4.0 * chance.lognormvariate(0, noise) for rank in rows}
        whole = max(own.values()) + 0.01
        for rank, own_s in own.items():
            waits_s = whole - own_s if waiting else 0.01
            rows[rank].append(StepRow(step, own_s + waits_s, 0.001, own_s - 0.002, 0.0, waits_s, 0.001, samples(rank)))
    return {rank: pace for rank, each in rows.items() if (pace := pace_of(each)) is not None}


def found(windows: Sequence[Window], split: Parallel) -> list[tuple[int, ...]]:
    teams = teams_of(split)
    return list(persistent([suspects_in(window, teams) for window in windows]))


def windows(ranks: int, slow: Rate, seed: int = 1, count: int = WINDOWS, **more: Any) -> list[Window]:
    chance = random.Random(seed)
    return [a_window(ranks, slow, chance=chance, **more) for _ in range(count)]


def only(rank: int, factor: float = 1.3) -> Rate:
    return lambda each: factor if each == rank else 1.0


EQUAL: Rate = lambda rank: 1.0  # noqa: E731


@pytest.mark.parametrize("ranks", [2, 3, 8, 200])
def test_a_rank_that_takes_1_3_times_as_long_is_named_and_no_other(ranks: int) -> None:
    split = Parallel(data=ranks)
    assert found(windows(ranks, only(1)), split) == [(1,)]
    assert found(windows(ranks, EQUAL), split) == []
    assert found(windows(ranks, only(1, 1.05)), split) == []  # less than the minimum effect


def test_noise_names_nobody() -> None:
    falsely = 0
    for seed in range(100):
        falsely += bool(found(windows(8, EQUAL, seed, noise=0.3), Parallel(data=8)))
    assert falsely == 0


def test_one_slow_window_names_nobody_and_a_named_rank_stays_while_half_of_the_windows_are_slow() -> None:
    teams, (fast, slow) = teams_of(Parallel(data=4)), (windows(4, EQUAL, count=1)[0], windows(4, only(2), count=1)[0])
    verdicts = [suspects_in(each, teams) for each in (fast, slow)]
    assert not persistent([verdicts[1], verdicts[0], verdicts[1], verdicts[1]])
    assert not persistent([verdicts[1]] * (WINDOWS - 1))
    assert [*persistent([verdicts[1]] * WINDOWS)] == [(2,)]
    mixed = [verdicts[1], verdicts[1], verdicts[0], verdicts[0]]
    assert [*persistent(mixed, named={(2,)})] == [(2,)]
    assert not persistent([*mixed[1:], verdicts[0]], named={(2,)})


@pytest.mark.parametrize("samples", [[3, 3, 2, 2], [4, 4, 3, 3], [2, 1, 1, 1], [1, 1, 1, 0]])
def test_ranks_with_more_samples_are_not_slow_but_a_slow_one_among_them_is(samples: list[int]) -> None:
    share: Rate = lambda rank: float(samples[rank])  # noqa: E731
    cost: Rate = lambda rank: 0.06 + 0.02 / max(samples[rank], 0.01)  # noqa: E731  # a fixed part, and one per sample
    assert found(windows(4, EQUAL, samples=share, work_s=cost), Parallel(data=4)) == []
    if samples[1] == samples[0]:
        assert found(windows(4, only(0, 1.6), samples=share, work_s=cost), Parallel(data=4)) == [(0,)]


def test_stages_of_a_pipeline_are_compared_only_with_their_replicas() -> None:
    by_stage: Rate = lambda rank: 0.03 if rank < 4 else 0.09  # noqa: E731  # rank = pipe x 4 + data
    split = Parallel(data=4, pipe=2)
    assert found(windows(8, EQUAL, work_s=by_stage), split) == []
    assert found(windows(8, only(6), work_s=by_stage), split) == [(6,)]
    assert teams_of(Parallel(pipe=4)) == []  # no replicas, so nothing to compare with


def test_tensor_ranks_wait_for_each_other_and_are_named_together() -> None:
    in_group: Rate = lambda rank: 1.3 if rank in (2, 3) else 1.0  # noqa: E731  # rank = data x 2 + tensor
    split = Parallel(data=4, tensor=2)
    assert found(windows(8, in_group), split) == [(2, 3)]
    places = {rank: Place(0, "n0", rank) for rank in range(8)}
    (one,) = stragglers_of(
        persistent([suspects_in(each, teams_of(split)) for each in windows(8, in_group)]), teams_of(split), places
    )
    assert (one.kind, one.name) == ("ranks", "ranks 2-3")


def test_a_slow_rank_that_delays_nobody_is_not_named() -> None:
    assert found(windows(4, only(1), waiting=False), Parallel(data=4)) == []  # nobody waits for it


def a_straggler(kind: str, places: dict[int, Place], slow: Sequence[int]) -> Straggler:
    teams = teams_of(Parallel(data=len(places)))
    factor: Rate = lambda rank: 1.3 if rank in slow else 1.0  # noqa: E731
    verdicts = persistent([suspects_in(each, teams) for each in windows(len(places), factor)])
    (one,) = stragglers_of(verdicts, teams, places)
    assert one.kind == kind
    return one


def test_ranks_of_a_slow_node_or_gpu_are_named_as_that_node_or_gpu() -> None:
    two = {rank: Place(rank // 2, f"n{rank // 2}") for rank in range(8)}
    assert a_straggler("node", two, (2, 3)).name == "node 1 (n1), ranks 2-3"
    assert a_straggler("rank", two, (3,)).name == "rank 3 on node 1 (n1)"
    shared = {rank: Place(rank // 4, f"n{rank // 4}", rank % 4 // 2) for rank in range(8)}
    assert a_straggler("gpu", shared, (6, 7)).name == "GPU 1 of node 1 (n1), ranks 6-7"
    alone = {rank: Place(rank, f"n{rank}") for rank in range(4)}
    assert a_straggler("node", alone, (3,)).name == "node 3 (n3), rank 3"
    assert a_straggler("rank", {rank: Place(0, "n0") for rank in range(4)}, (1,)).name == "rank 1 on node 0 (n0)"


def test_the_evidence_names_the_part_of_the_step_and_survives_the_events_file() -> None:
    one = a_straggler("rank", {rank: Place(0, "n0") for rank in range(4)}, (1,))
    assert "forward and backward" in one.evidence
    assert 1.2 < one.slow.own_s / one.slow.usual_s < 1.4
    row = typed(json.loads(json.dumps({"event": "slow", "stragglers": [one.record(), {"kind": "moon"}, 7]})))
    assert read_stragglers(row["stragglers"]) == (one,)
    for name in one.record():
        broken = {**one.record(), name: "\x1b[2J"}
        for each in read_stragglers([broken]):
            assert each.kind in ("rank",)
            assert each.slow.part in PARTS
    assert read_stragglers({"kind": "rank"}) == ()


def test_the_console_names_each_straggler_and_says_when_none_is_left() -> None:
    one = a_straggler("rank", {rank: Place(0, "n0") for rank in range(4)}, (1,))
    (line,) = lines_of({"event": "slow", "attempt": 0, "stragglers": [one.record()]})
    assert line == f"muster: warning: slow: {one.name}: {one.evidence}"
    assert lines_of({"event": "slow", "attempt": 0, "stragglers": []}) == ["no rank is slow now"]


# Reading --------------------------------------------------------------------------------------------------------------


def write_steps(run: Any, rank: int, numbers: range, own_s: float, whole_s: float, **more: Any) -> None:
    rows = [
        {"step": each, "attempt": 0, "rank": rank, "time": 1e9 + each, "step_s": whole_s, "forward_s": own_s / 2}
        | {"backward_s": own_s / 2, "communication_s": whole_s - own_s, "data_s": 0.0, "samples": 4}
        | more
        for each in numbers
    ]
    with run.attempt(0).metrics(rank).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_watch_names_a_rank_after_windows_of_new_steps_and_forgets_it_when_it_recovers(make_run: Any) -> None:
    run = make_run().submitted().attempt().run
    run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    watch = PaceWatch(run.attempt(0), teams_of(Parallel(data=4)))
    assert watch.look() >= 0.0  # no file yet

    def train(first: int, slow_s: float) -> list[tuple[int, ...]]:
        for rank in range(4):
            write_steps(run, rank, range(first, first + 12), slow_s if rank == 2 else 0.1, 0.14)
        watch.look(most=3)
        watch.look(most=3)
        return list(watch.found)

    assert [train(1 + 12 * at, 0.13) for at in range(WINDOWS)] == [[]] * (WINDOWS - 1) + [[(2,)]]
    for _ in range(5):
        watch.look()  # nothing new: no further windows
    assert list(watch.found) == [(2,)]
    assert [train(101 + 12 * at, 0.1) for at in range(3)] == [[(2,)], [(2,)], []]


def test_steps_whose_waits_are_not_measured_are_not_judged(make_run: Any) -> None:
    run = make_run().submitted().attempt().run
    run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    write_steps(run, 0, range(1, 4), 0.1, 0.14, communication_s=None)
    write_steps(run, 0, range(4, 6), 0.1, 0.14, forward_s=0.0)  # a pipeline on GPUs, or a recorded step
    write_steps(run, 0, range(6, 8), 0.1, 0.14)
    with run.attempt(0).metrics(0).open("a") as file:
        file.write('{"step": 1e999}\n[[[\n{"step": 8, "step_s": 0.1')
    assert [row.step for row in newest_steps(run.attempt(0), 0)] == [6, 7]
    assert newest_steps(run.attempt(0), 1) == []


# Views ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_run(make_run: Any) -> Any:
    """A run whose supervisor has named rank 3."""
    folder = make_run().submitted().attempt().started().event("joined", 2.0, attempt=0)
    one = a_straggler("rank", {rank: Place(0, "n0") for rank in range(4)}, (3,))
    return folder.event("slow", 30.0, attempt=0, stragglers=[one.record()])


def test_status_watch_and_why_name_the_straggler(slow_run: Any, in_process: Any) -> None:
    for command in ("status", "why", "watch"):
        code, out, _ = in_process(command, slow_run.run.run_id, *(["--once"] if command == "watch" else []))
        assert code == 0
        assert "rank 3 on node 0 (n0)" in out, command
        code, out, _ = in_process(command, slow_run.run.run_id, "--json", *(["--once"] if command == "watch" else []))
        assert [each["ranks"] for each in json.loads(out)["stragglers"]] == [[3]], command
    slow_run.event("slow", 60.0, attempt=0, stragglers=[])  # it has recovered
    assert "rank 3 on node 0" not in in_process("status", slow_run.run.run_id)[1]


@pytest.mark.parametrize(("row", "said"), [({"forward_s": 0.0}, True), ({"communication_s": None}, True), ({}, False)])
def test_status_says_that_waits_are_not_measured(
    row: dict[str, Any], said: bool, make_run: Any, in_process: Any
) -> None:
    folder = make_run().submitted(world_size=4).attempt().started().event("joined", 2.0, attempt=0)
    folder.run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    write_steps(folder.run, 0, range(1, 4), 0.1, 0.14, **row)
    lines = in_process("status", folder.run.run_id)[1].splitlines()
    assert any(line.startswith("slow     unknown: waits are not measured") for line in lines) == said


def test_compare_notes_the_straggler(slow_run: Any, in_process: Any) -> None:
    slow_run.step(1).run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    for rank in range(4):
        write_steps(slow_run.run, rank, range(1, 21), 0.1, 0.14)
    code, out, err = in_process("compare", slow_run.run.run_id)
    assert code == 0, err
    assert "slow: rank 3 on node 0 (n0): 1.3" in out
    assert "rank 3 on node 0" in in_process("compare", slow_run.run.run_id, "--csv")[1]


def test_a_new_attempt_begins_without_stragglers(slow_run: Any, in_process: Any) -> None:
    slow_run.event("attempt", 70.0, attempt=1, world_size=4, hosts=["n0", "n0"])
    assert json.loads(in_process("status", slow_run.run.run_id, "--json")[1])["stragglers"] == []


def test_a_run_without_a_supervisor_is_judged_from_its_files(make_run: Any, in_process: Any) -> None:
    folder = make_run().submitted(transport="direct", world_size=4)
    folder.run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    folder.run.job.write_text("nodes: 1\nranks_per_node: 4\ntrain: {model: vgg11, data: digits, mode: bucketed}\n")
    for rank in range(4):
        write_steps(folder.run, rank, range(1, 101), 0.13 if rank == 1 else 0.1, 0.14)
    assert "rank 1" in in_process("status", folder.run.run_id)[1]
