"""Ranks that continue in place: real agents, ranks and gloo, and the bits of an uninterrupted run."""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.machine import linux
from support.exact_jobs import GPT, STEPS, TRAIN, tokens
from support.live import LiveRun, wait_until
from support.resuming import hashes

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(250)]
pytestmark += [pytest.mark.usefixtures("forked_supervisors")]

MODEL = TRAIN["model"]


def job(
    *, nodes: int = 1, ranks: int = 4, train: dict[str, Any] | None = None, checkpoint: Any = None, **restart: Any
) -> str:
    settings = {**TRAIN, **(train or {})}
    described = {
        "nodes": nodes,
        "ranks_per_node": ranks,
        "grace_s": 1.0,
        "train": {key: value for key, value in settings.items() if value is not None},
        "checkpoint": checkpoint or {"every_steps": 20},
        "restart": {"max": 5, "backoff": 0.0, "in_place": "auto", **restart},
    }
    return json.dumps(described)


def wait_step(live: LiveRun, step: int, attempt: int | None = None) -> None:
    wait_until(lambda: step_of(live, attempt) >= step, f"step {step}")


def step_of(live: LiveRun, attempt: int | None = None) -> int:
    rows = read_lines(live.run.metrics)
    return max((row["step"] for row in rows if attempt in (None, row["attempt"])), default=0)


def pids(live: LiveRun, attempt: int) -> dict[int, int]:
    """Return {rank: pid} of the newest start messages of an attempt."""
    wait_until(lambda: [row for row in live.events("joined") if row["attempt"] == attempt], f"attempt {attempt}")
    rows = [row for row in live.events("started") if row["attempt"] == attempt]
    return {int(rank): int(pid) for row in rows for rank, pid in row["ranks"]}


def kill(live: LiveRun, attempt: int, rank: int) -> None:
    os.kill(pids(live, attempt)[rank], signal.SIGKILL)


def no_step_is_repeated(live: LiveRun) -> None:
    steps = [row["step"] for row in read_lines(live.run.metrics)]
    assert steps == sorted(steps), steps
    assert len(steps) - len(set(steps)) <= len(live.events("regrouped"))


@pytest.mark.parametrize(
    ("victim", "train"),
    [(0, {}), pytest.param(2, {"mode": None, "parallel": {"data": 4, "sync": "flat"}}, marks=pytest.mark.soak)],
)
def test_three_of_four_ranks_continue_and_the_fourth_joins_them(
    tmp_path: Path, uninterrupted: Any, victim: int, train: dict[str, Any]
) -> None:
    live = LiveRun(tmp_path, job(train=train))
    before = pids(live, 0)
    wait_step(live, 10)
    kill(live, 0, victim)
    assert live.end() == 0, live.err
    first, second, third = read_lines(live.run.attempts)
    assert first["next"] == "attempt 1 on 3 ranks, in place"
    assert (first["lost_steps"], second["world_size"], third["world_size"]) == (0, 3, 4)
    after = pids(live, 2)
    assert [after[rank] for rank in range(3)] == [pid for rank, pid in before.items() if rank != victim]
    assert live.events("loaded") == []  # nothing came from the disk
    no_step_is_repeated(live)
    assert hashes(live.run.path) == uninterrupted({})
    assert live.left() == []


def test_a_second_rank_is_lost_while_the_others_regroup(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job())
    wait_step(live, 10)
    kill(live, 0, 2)
    live.wait_for("restarting")
    kill(live, 0, 1)
    assert live.end() == 0, live.err
    sizes = [row["world_size"] for row in read_lines(live.run.attempts)]
    assert sizes in ([4, 3, 2, 4], [4, 3, 3, 4], [4, 3, 2, 3, 4])  # the replacement of the first may be ready by then
    assert live.events("loaded") == []
    assert hashes(live.run.path) == uninterrupted({})


def test_steps_since_the_last_log_point_have_rows_without_the_lost_samples(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(train={"log_every": 20}))
    wait_step(live, 20)
    pid = pids(live, 0)[2]
    seen = live.run.attempt(0).metrics(1)
    wait_until(lambda: any(row["step"] > 22 for row in read_lines(seen)), "steps behind the log point")
    os.kill(pid, signal.SIGKILL)
    assert live.end() == 0, live.err
    rows = [row for row in read_lines(live.run.metrics) if "step_s" in row]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert len(rows) >= STEPS - 1  # rank 0 may have been a step behind
    partial = [row for row in rows if row.get("lost_samples")]
    assert partial
    assert all(row["attempt"] == 0 and 0 < row["lost_samples"] < 24 and row["loss"] > 0 for row in partial)


@pytest.mark.soak
def test_two_of_four_ranks_are_lost_at_once(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job())
    wait_step(live, 10)
    both = [pids(live, 0)[rank] for rank in (0, 3)]
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    assert live.end() == 0, live.err
    sizes = [row["world_size"] for row in read_lines(live.run.attempts)]
    assert sizes[0] == sizes[-1] == 4
    assert 2 in sizes
    assert live.events("loaded") == []
    assert hashes(live.run.path) == uninterrupted({})


@pytest.mark.soak  # with shards, a test below loses a node in the same way
@pytest.mark.parametrize("number", [0, 2])
def test_the_agent_of_a_node_is_killed(tmp_path: Path, uninterrupted: Any, number: int) -> None:
    live = LiveRun(tmp_path, job(nodes=4, ranks=1, min_nodes=2))
    wait_step(live, 10)
    os.kill(json.loads(live.run.attempt(0).node(number).read_text())["pid"], signal.SIGKILL)  # node 0 serves the store
    assert live.end() == 0, live.err
    first, second, *_ = read_lines(live.run.attempts)
    assert (first["next"], second["world_size"]) == ("attempt 1 on 3 ranks, in place", 3)
    assert live.events("loaded") == []
    assert hashes(live.run.path) == uninterrupted({})


@pytest.mark.soak
def test_a_rank_is_lost_while_another_one_is_ready_to_join(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job())
    wait_step(live, 10)
    kill(live, 0, 2)
    (joining,) = live.wait_for("joining")
    kill(live, joining["attempt"], 1)  # it trains, while the replacement starts
    assert live.end() == 0, live.err
    assert live.events("loaded") == []
    assert live.events("attempt")[-1]["world_size"] == 4
    assert hashes(live.run.path) == uninterrupted({})


def test_a_save_that_a_loss_has_interrupted_is_made_at_once(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job())
    wait_step(live, 5)
    for writer in linux.descendants(pids(live, 0)[2]):
        os.kill(writer, signal.SIGSTOP)
    wait_step(live, 21)
    kill(live, 0, 2)
    assert live.end() == 0, live.err
    assert live.events("saved")[0]["step"] == live.events("regrouped")[0]["step"] + 1 < 30
    assert hashes(live.run.path) == uninterrupted({})


def test_ranks_restart_from_the_disk_if_one_is_suspended(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job().replace('"grace_s": 1.0', '"grace_s": 1.0, "hang_s": 3.0'))
    live.wait_for("saved")
    os.kill(pids(live, 0)[2], signal.SIGSTOP)
    assert live.end() == 0, live.err
    (told,) = live.events("not_in_place")
    assert told["why"] == "the failure may be one of the program"
    assert len(live.events("loaded")) == 1
    assert hashes(live.run.path) == uninterrupted({})


@pytest.mark.soak
def test_a_joining_rank_is_killed_and_another_one_joins(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job(nodes=4, ranks=1))
    wait_step(live, 10)
    kill(live, 0, 2)
    (joining,) = live.wait_for("joining")

    def joiner() -> list[int]:
        rows = [row["ranks"] for row in live.events("started") if row["attempt"] == joining["attempt"]]
        return [int(pid) for ranks in rows for rank, pid in ranks if int(rank) in joining["joiners"]]

    wait_until(lambda: bool(joiner()), "the joining rank")
    os.kill(joiner()[0], signal.SIGKILL)
    assert live.end() == 0, live.err
    assert [row["world_size"] for row in read_lines(live.run.attempts)][:2] == [4, 3]
    assert live.events("attempt")[-1]["world_size"] == 4
    assert hashes(live.run.path) == uninterrupted({})


def test_the_source_of_the_state_is_killed_while_a_rank_joins(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job())
    wait_step(live, 10)
    kill(live, 0, 3)
    live.wait_for("restarting", 2)
    kill(live, 1, 0)  # rank 0 is about to send its state to the rank that joins
    assert live.end() == 0, live.err
    assert live.events("loaded") == []
    assert hashes(live.run.path) == uninterrupted({})


def pipelines(sync: str, **more: Any) -> dict[str, Any]:
    """Return the settings of two pipelines of two stages."""
    split = {"data": 2, "pipe": 2, "sync": sync, "microbatches": 2, **more}
    model = {**MODEL, "layers": 3, "dropout": 0.0}
    settings = {"parallel": split, "model": model, "data": tokens(pause_s=0.025)}
    return {**settings, "mode": None, "exact": None, "virtual_ranks": None}


def losses(live: LiveRun) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_lines(live.run.metrics)}


@pytest.fixture(scope="module")
def whole_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of an uninterrupted run, in which one rank trains the model of the pipelines."""
    train = {**pipelines(""), "parallel": None, "mode": "single", "data": tokens(pause_s=0.0)}
    live = LiveRun(tmp_path_factory.mktemp("whole"), job(ranks=1, train=train))
    assert live.end() == 0, live.err
    return losses(live)


@pytest.mark.parametrize(
    ("nodes", "victims"), [pytest.param(1, [1], marks=pytest.mark.soak), (4, [2]), pytest.param(1, [0, 2], id="both")]
)
def test_a_pipeline_leaves_and_another_one_joins(
    tmp_path: Path, whole_losses: dict[int, float], nodes: int, victims: list[int]
) -> None:
    train = pipelines("bucketed")
    live = LiveRun(tmp_path, job(train=train, nodes=nodes, ranks=4 // nodes, min_nodes=1))
    before = pids(live, 0)
    wait_step(live, 10)
    for victim in victims:
        os.kill(before[victim], signal.SIGKILL)
    assert live.end() == 0, live.err
    assert [row["world_size"] for row in read_lines(live.run.attempts)] == [4, 2, 4]
    assert live.events("loaded") == []
    assert len(set(before.values()) & set(pids(live, 2).values())) == 2
    no_step_is_repeated(live)
    found = losses(live)
    assert found == pytest.approx({step: whole_losses[step] for step in found}, rel=1e-3)
    assert live.left() == []


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ({"mode": "zero1"}, "no rank has a copy of the state of another, and checkpoint.memory_every_steps is not set"),
        ({"virtual_ranks": 4}, "3"),  # ranks do not divide the virtual ranks
    ],
)
def test_otherwise_all_ranks_restart_from_the_disk(tmp_path: Path, uninterrupted: Any, train: dict, why: str) -> None:
    live = LiveRun(tmp_path, job(train=train))
    live.wait_for("saved")
    kill(live, 0, 2)
    assert live.end() == 0, live.err
    (told,) = live.events("not_in_place")
    assert why in told["why"]
    assert f"all ranks restart: {told['why']}" in live.err
    assert [row["world_size"] for row in read_lines(live.run.attempts)] == [4, 4]
    assert len(live.events("loaded")) == 1
    assert hashes(live.run.path) == uninterrupted({name: value for name, value in train.items() if name != "mode"})


MEMORY = {"every_steps": 1000, "memory_every_steps": 5}


def wait_copied(live: LiveRun, step: int) -> None:
    wait_until(lambda: any(row["step"] >= step for row in live.events("copied")), f"the copies of step {step}")


def agent_of(live: LiveRun, number: int) -> int:
    return json.loads(live.run.attempt(0).node(number).read_text())["pid"]


def nothing_restarted(live: LiveRun, before: dict[int, int]) -> None:
    """Check that no rank ended but those that a test has killed, and that nothing came from the disk."""
    assert live.events("not_in_place") == []
    assert live.events("stopping") == []
    assert all(row["checkpoint"] in live.err for row in live.events("loaded"))
    rows = [*read_lines(live.run.attempts)]
    for before_it, row in pairwise(rows):  # no complete copy was left out
        copies = [each["step"] for each in live.events("copied") if each["attempt"] <= before_it["attempt"]]
        assert row["from_step"] >= max(copies), rows
    last = {pid for row in live.events("started") for _, pid in row["ranks"] if row["attempt"] > 0}
    assert len(last & set(before.values())) >= len(before) // 2


def by_hand(**split: Any) -> dict[str, Any]:
    return {"mode": None, "parallel": {"data": 4, **split}}


@pytest.mark.parametrize(
    "train",
    [
        pytest.param({"mode": "zero1"}, marks=pytest.mark.soak),
        pytest.param({"mode": "zero2"}, marks=pytest.mark.soak),
        pytest.param({"mode": "zero3"}, marks=pytest.mark.soak),
        by_hand(zero=1),
        pytest.param({"mode": "fsdp", "exact": None, "virtual_ranks": None}, marks=pytest.mark.soak),
    ],
)
def test_sharded_ranks_continue_from_the_copies_in_memory(
    tmp_path: Path, uninterrupted: Any, train: dict[str, Any]
) -> None:
    live = LiveRun(tmp_path, job(nodes=4, ranks=1, train=train, checkpoint=MEMORY, min_nodes=2))
    before = pids(live, 0)
    wait_copied(live, 15)
    kill(live, 0, 2)
    assert live.end() == 0, live.err
    rows = [*read_lines(live.run.attempts)]
    assert [row["world_size"] for row in rows] == [4, 3, 4]
    assert rows[1]["from"].endswith(" in memory")
    assert rows[1]["from_step"] >= 15
    # The others copied their state when the replacement joined.
    assert (rows[2]["from_step"], rows[1]["lost_steps"]) == (rows[1]["last_step"], 0)
    assert "attempt 1 in place: 3 ranks continue" in live.err
    after = pids(live, 2)
    assert len(set(after.values()) & set(before.values())) == 3
    nothing_restarted(live, before)
    if train.get("mode") != "fsdp":  # it has no fixed order of sums
        assert hashes(live.run.path) == uninterrupted({})
    assert live.left() == []


def test_pipelines_with_shards_continue_from_the_copies_in_memory(
    tmp_path: Path, whole_losses: dict[int, float]
) -> None:
    train = pipelines("sharded", zero=1)
    live = LiveRun(tmp_path, job(train=train, checkpoint=MEMORY))
    before = pids(live, 0)
    wait_copied(live, 15)
    kill(live, 0, 3)
    assert live.end() == 0, live.err
    rows = [*read_lines(live.run.attempts)]
    assert [row["world_size"] for row in rows] == [4, 2, 4]
    assert rows[1]["from"].endswith(" in memory")
    nothing_restarted(live, before)
    found = losses(live)
    assert found == pytest.approx({step: whole_losses[step] for step in found}, rel=1e-3)


def test_a_node_with_shards_is_lost(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job(nodes=4, ranks=1, train={"mode": "zero1"}, checkpoint=MEMORY, min_nodes=2))
    before = pids(live, 0)
    wait_copied(live, 15)
    os.kill(agent_of(live, 0), signal.SIGKILL)  # it also serves the store
    assert live.end() == 0, live.err
    rows = [*read_lines(live.run.attempts)]
    assert [row["world_size"] for row in rows][:2] == [4, 3]
    nothing_restarted(live, before)
    assert hashes(live.run.path) == uninterrupted({})


@pytest.mark.soak
def test_a_second_rank_is_lost_while_sharded_ranks_regroup(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job(nodes=4, ranks=1, train={"mode": "zero2"}, checkpoint=MEMORY, min_nodes=1))
    before = pids(live, 0)
    wait_copied(live, 10)
    kill(live, 0, 2)
    live.wait_for("restarting")
    os.kill(before[1], signal.SIGKILL)
    assert live.end() == 0, live.err
    assert [row["world_size"] for row in read_lines(live.run.attempts)][-1] == 4
    nothing_restarted(live, before)
    assert hashes(live.run.path) == uninterrupted({})


def test_a_second_rank_is_lost_when_a_replacement_joins_sharded_ranks(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job(train={"mode": "zero1"}, checkpoint=MEMORY))
    before = pids(live, 0)
    wait_copied(live, 10)
    kill(live, 0, 2)
    live.wait_for("restarting", 2)  # the others have copied their state for the replacement
    kill(live, 1, 0)
    assert live.end() == 0, live.err
    assert live.events("attempt")[-1]["world_size"] == 4
    nothing_restarted(live, before)
    assert hashes(live.run.path) == uninterrupted({})


@pytest.mark.soak
def test_a_node_is_lost_while_the_others_get_the_shards(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job(nodes=4, ranks=1, train={"mode": "zero1"}, checkpoint=MEMORY, min_nodes=1))
    before = pids(live, 0)
    wait_copied(live, 10)
    second = agent_of(live, 3)
    os.kill(second, signal.SIGSTOP)  # it does not answer
    kill(live, 0, 1)
    wait_until(lambda: len(live.events("exited")) > 0, "the first failure")
    os.kill(second, signal.SIGKILL)
    assert live.end() == 0, live.err
    rows = [*read_lines(live.run.attempts)]
    assert [row["world_size"] for row in rows][:2] == [4, 2]  # one attempt in place after both failures
    nothing_restarted(live, before)
    assert hashes(live.run.path) == uninterrupted({})


def test_sharded_ranks_restart_from_the_disk_if_a_shard_is_lost(tmp_path: Path, uninterrupted: Any) -> None:
    checkpoint = {"every_steps": 20, "memory_every_steps": 7}
    live = LiveRun(tmp_path, job(nodes=4, ranks=1, train={"mode": "zero1"}, checkpoint=checkpoint, min_nodes=1))
    live.wait_for("saved")
    wait_copied(live, 21)
    agents = [agent_of(live, node) for node in (1, 2)]  # node 2 has the copy of node 1
    live.process.send_signal(signal.SIGSTOP)  # the supervisor learns of both losses at once
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    live.process.send_signal(signal.SIGCONT)
    assert live.end() == 0, live.err
    why = live.events("not_in_place")[-1]["why"]
    # The connections break one after the other, so the supervisor may still ask node 2 for the copy.
    assert "the shards of rank 1 were lost with" in why or "the nodes cannot get a checkpoint" in why
    rows = [*read_lines(live.run.attempts)]
    assert rows[1]["from_step"] % 20 == 0
    assert hashes(live.run.path) == uninterrupted({})


ON_GPUS = {"device": "cuda", "data": "synthetic", "model": GPT, "deterministic": True, "steps": 800}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", ["allreduce", "bucketed"])
@pytest.mark.parametrize("graph", [False, "auto"])
def test_a_gpu_rank_continues_alone_and_another_joins_it(
    tmp_path: Path, uninterrupted: Any, mode: str, graph: Any
) -> None:
    train = {**ON_GPUS, "virtual_ranks": 2, "steps": 300, "mode": mode, "cuda_graph": graph}
    live = LiveRun(tmp_path, job(ranks=2, train=train))
    before = pids(live, 0)
    wait_step(live, 20)
    kill(live, 0, 1)
    assert live.end() == 0, live.err
    assert [row["world_size"] for row in read_lines(live.run.attempts)] == [2, 1, 2]
    assert pids(live, 2)[0] == before[0]
    for attempt in range(3):  # graphs are recorded anew
        said = live.run.attempt(attempt).out(0).read_text()
        assert ("steps are replayed from a CUDA graph" in said) == (graph == "auto"), said
    no_step_is_repeated(live)
    assert hashes(live.run.path) == uninterrupted(train)


@pytest.mark.gpu(4)
@pytest.mark.parametrize(("mode", "victim"), [("allreduce", 0), ("bucketed", 2)])
def test_three_of_four_gpus_continue(tmp_path: Path, uninterrupted: Any, mode: str, victim: int) -> None:
    train = {**ON_GPUS, "mode": mode}
    live = LiveRun(tmp_path, job(train=train))
    before = pids(live, 0)
    wait_step(live, 20)
    kill(live, 0, victim)
    assert live.end() == 0, live.err
    assert [row["world_size"] for row in read_lines(live.run.attempts)] == [4, 3, 4]
    assert len(set(pids(live, 2).values()) & set(before.values())) == 3
    assert live.events("loaded") == []
    no_step_is_repeated(live)
    assert hashes(live.run.path) == uninterrupted(train)


@pytest.mark.parametrize(
    ("gpus", "train"),
    [
        pytest.param(gpus, {"mode": mode, **more}, marks=pytest.mark.gpu(gpus), id=f"{mode} on {gpus}")
        for gpus, mode, more in [
            (2, "zero1", {"cuda_graph": "auto"}),
            (2, "zero2", {"cuda_graph": False, "virtual_ranks": 2, "steps": 600}),
            (2, "zero3", {"virtual_ranks": 2, "steps": 600}),
            (2, "fsdp", {"exact": None, "virtual_ranks": None}),
            (4, "zero1", {"cuda_graph": "auto"}),
            (4, "zero3", {"steps": 200}),
        ]
    ],
)
def test_sharded_ranks_on_gpus_continue_from_the_copies_in_memory(
    tmp_path: Path, uninterrupted: Any, gpus: int, train: dict[str, Any]
) -> None:
    train = {**ON_GPUS, **train}
    live = LiveRun(tmp_path, job(ranks=gpus, train=train, checkpoint=MEMORY))
    before = pids(live, 0)
    wait_copied(live, 15)
    kill(live, 0, gpus // 2)
    assert live.end() == 0, live.err
    rows = [*read_lines(live.run.attempts)]
    assert [row["world_size"] for row in rows] == [gpus, gpus - 1, gpus]
    assert rows[1]["from"].endswith(" in memory")
    left = {row["step"] for row in live.events("waiting") if row["why"] == "ranks join"}
    assert left == {rows[2]["from_step"]}  # nothing is lost when a rank joins
    assert len(set(pids(live, 2).values()) & set(before.values())) == gpus - 1
    nothing_restarted(live, before)
    if train["mode"] != "fsdp":  # it has no fixed order of sums
        assert hashes(live.run.path) == uninterrupted(train)


def in_parts(**split: Any) -> dict[str, Any]:
    """Return the settings of two copies of a model on four GPUs."""
    model = {**GPT, "layers": 3, "dropout": 0.0}
    return {**pipelines("bucketed"), **ON_GPUS, "model": model, "parallel": {"data": 2, "sync": "bucketed", **split}}


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("train", "memory"),
    [
        ({**in_parts(pipe=2, microbatches=2), "cuda_graph": False}, False),
        (in_parts(pipe=2, microbatches=2), False),
        (in_parts(tensor=2), False),
        (in_parts(pipe=2, microbatches=2, sync="sharded", zero=1), True),
    ],
    ids=["pipe", "recorded pipe", "tensor", "pipe with shards"],
)
def test_a_copy_of_a_split_model_on_gpus_continues(tmp_path: Path, train: dict[str, Any], memory: bool) -> None:
    live = LiveRun(tmp_path, job(train=train, checkpoint=MEMORY if memory else None))
    before = pids(live, 0)
    wait_copied(live, 15) if memory else wait_step(live, 20)
    kill(live, 0, 2)
    assert live.end() == 0, live.err
    assert [row["world_size"] for row in read_lines(live.run.attempts)] == [4, 2, 4]
    assert len(set(pids(live, 2).values()) & set(before.values())) == 2
    if memory:
        nothing_restarted(live, before)
    else:
        assert live.events("loaded") == []
        no_step_is_repeated(live)
    (tmp_path / "whole").mkdir()
    whole = LiveRun(tmp_path / "whole", job(train=train))
    assert whole.end() == 0, whole.err
    found, wanted = ({step: loss for step, loss in losses(each).items() if step <= 150} for each in (live, whole))
    assert found == pytest.approx({step: wanted[step] for step in found}, rel=1e-3)


@pytest.mark.gpu(4)
def test_a_second_gpu_rank_is_lost_while_the_others_regroup(tmp_path: Path, uninterrupted: Any) -> None:
    train = {**ON_GPUS, "mode": "bucketed"}
    live = LiveRun(tmp_path, job(train=train))
    wait_step(live, 20)
    kill(live, 0, 2)
    live.wait_for("restarting")
    kill(live, 0, 1)
    assert live.end() == 0, live.err
    assert [row["world_size"] for row in read_lines(live.run.attempts)][-1] == 4
    assert live.events("not_in_place") == []
    assert hashes(live.run.path) == uninterrupted(train)


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("train", "memory"),
    [
        ({"mode": "bucketed"}, False),
        ({"mode": "zero1", "cuda_graph": "auto"}, True),
        (in_parts(pipe=2, microbatches=2), False),
    ],
    ids=["replicas", "zero1", "one of two pipelines"],
)
def test_two_of_four_gpu_ranks_are_lost_at_once(
    tmp_path: Path, uninterrupted: Any, train: dict[str, Any], memory: bool
) -> None:
    train = {**ON_GPUS, **train}
    live = LiveRun(tmp_path, job(train=train, checkpoint=MEMORY if memory else None))
    before = pids(live, 0)
    wait_copied(live, 15) if memory else wait_step(live, 20)
    for rank in (0, 2):
        os.kill(before[rank], signal.SIGKILL)
    assert live.end() == 0, live.err
    sizes = [row["world_size"] for row in read_lines(live.run.attempts)]
    assert sizes[0] == sizes[-1] == 4
    assert 2 in sizes
    assert live.events("not_in_place") == []
    if memory:
        nothing_restarted(live, before)
    else:
        no_step_is_repeated(live)
    if "parallel" not in train:  # fewer pipelines add up in another order
        assert hashes(live.run.path) == uninterrupted(train)
