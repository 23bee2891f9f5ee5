"""One attempt, message by message, without processes: drains, hangs, and what its verdict says."""

import time
from pathlib import Path
from typing import Any, TypeVar

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.files import read_lines
from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.failover import CheckpointSettings
from muster.jobs.spec.job import Job
from muster.jobs.spec.site import Site
from muster.jobs.spec.train import TrainSettings
from muster.launch.plan.plan import Context
from muster.launch.records.eventlog import EventLog
from muster.launch.records.verdict import Stop
from muster.launch.supervision import hangs
from muster.launch.supervision.attempt import Attempt
from muster.launch.supervision.console import Console
from muster.launch.supervision.crew import Node
from muster.launch.supervision.progress import Hang
from muster.launch.supervision.stacks import Absent
from muster.launch.wire.codec import ProtocolError, decode, encode
from muster.launch.wire.messages import (
    FROM_AGENT,
    TO_AGENT,
    Dump,
    Held,
    Hold,
    Report,
    Stacks,
    StopAt,
    StopRanks,
    Swept,
    ToAgent,
)
from support.messages import exited, hello

Order = TypeVar("Order")
STOP = Stop(exits.STOPPED, "stopped by Ctrl-C")


class Channel:
    """Takes whatever is posted."""

    def post(self, message: ToAgent) -> None:
        raise AssertionError("attempts send through the function that they are given")


class Played:
    """An attempt of two nodes with a rank each, whose agents are this test."""

    def __init__(self, folder: Path, *, saving: bool = True) -> None:
        self.run = RunDir(folder / "run-1")
        self.run.attempt(0).path.mkdir(parents=True)
        settings = TrainSettings.model_validate({"model": "vgg11", "data": "digits", "steps": 100})
        job = Job(name="demo", nodes=2, kind="train", settings=settings, checkpoint=CheckpointSettings())
        placement = place(job, [Host(f"n{number}", "127.0.0.1") for number in range(2)])
        options = {"saving": saving, "resume": {"checkpoint": "step-00000010.a000", "step": 10}}
        context = Context(job, Site(), placement, self.run, "/srv", "/opt/python", "m:f", options=options)
        nodes = [Node(place) for place in placement.nodes]
        for number, node in enumerate(nodes):
            node.hello, node.channel = hello(host=f"n{number}"), Channel()  # type: ignore[assignment]
        self.nodes = nodes
        self.sent: list[tuple[int, ToAgent]] = []
        self.attempt = Attempt(
            context, nodes, EventLog(self.run), Console(quiet=True), lambda node, m: self.sent.append((node, m)), 0.0
        )
        self.attempt.startup.begun = True

    def report(self, what: str, rank: int = 0, **fields: Any) -> None:
        self.attempt.take(rank, Report(0, rank, {"report": what, **fields}))  # type: ignore[arg-type, misc]

    def working(self) -> "Played":
        for rank in range(2):
            self.report("arrived", rank)
            self.report("joined", rank)
        self.report("first_step", step=11)
        return self

    def exited(self, rank: int, code: int | None, *, sent: str | None = None, **failure: Any) -> None:
        signal = None if code is not None else sent or "SIGKILL"
        told = {"report": "failed", "time": time.time(), **failure} if failure else {}
        self.attempt.take(rank, exited(rank, code, signal=signal, sent=sent, ended=time.time(), failure=told))

    def orders(self, kind: type[Order]) -> list[tuple[int, Order]]:
        return [(node, message) for node, message in self.sent if isinstance(message, kind)]

    def swept(self, node: int, **fields: Any) -> None:
        self.attempt.take(node, Swept(**{"attempt": 0, "swept": 0, "left": (), **fields}))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.run.events) if row["event"] == name]


def stack_of(rank: int, *lines: str) -> Stacks:
    return Stacks(0, ({"rank": rank, "state": "S", "lines": lines},))


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path).working()


def test_a_drain_asks_all_to_hold_and_the_first_that_does_names_the_step(played: Played) -> None:
    assert played.attempt.drain(STOP, "Ctrl-C")
    assert played.orders(Hold) == [(0, Hold(0)), (1, Hold(0))]
    played.attempt.take(1, Held(0, 23))
    played.attempt.take(0, Held(0, 23))
    assert played.orders(StopAt) == [(0, StopAt(0, 24)), (1, StopAt(0, 24))]
    assert played.orders(StopRanks) == []


def test_a_drained_attempt_ends_with_what_was_asked_for_and_says_what_was_saved(played: Played) -> None:
    played.attempt.drain(STOP, "Ctrl-C")
    played.attempt.take(0, Held(0, 23))
    played.report("saved", step=24, checkpoint="step-00000024.a000", stall_s=0.1, seconds=0.2, bytes=4)
    played.exited(0, exits.REQUEUE)
    assert not played.attempt.is_over()
    played.exited(1, exits.REQUEUE)
    for node in range(2):
        played.swept(node)
    assert played.attempt.is_over()
    verdict = played.attempt.verdict()
    assert (verdict.code, verdict.message) == (exits.STOPPED, "stopped by Ctrl-C; saved after step 24")
    assert verdict.first is None


def test_a_drain_whose_save_fails_says_so_and_keeps_its_code(played: Played) -> None:
    played.attempt.drain(Stop(exits.REQUEUE, "the time limit is near"), "SIGUSR2")
    played.exited(1, None)
    assert played.attempt.is_stopping
    verdict = played.attempt.verdict()
    assert (verdict.code, verdict.message) == (exits.REQUEUE, "the time limit is near; nothing more was saved")


def test_a_training_that_ends_while_it_is_asked_to_drain_is_done(played: Played) -> None:
    played.attempt.drain(STOP, "Ctrl-C")
    played.exited(0, 0)
    played.exited(1, 0)
    assert played.attempt.is_over()
    assert played.attempt.verdict().code == exits.DONE


def test_a_drain_that_takes_too_long_is_cut_off(played: Played) -> None:
    played.attempt.drain(STOP, "Ctrl-C")
    played.attempt.tick(time.monotonic())
    assert played.orders(StopRanks) == []
    played.attempt.tick(played.attempt.drain_deadline + 0.1)
    assert len(played.orders(StopRanks)) == 2


@pytest.mark.parametrize("saving", [True, False])
def test_what_saves_nothing_or_has_not_begun_cannot_drain(tmp_path: Path, saving: bool) -> None:
    played = Played(tmp_path, saving=saving)
    if not saving:
        played.working()
    assert not played.attempt.drain(STOP, "Ctrl-C")
    assert played.sent == []


def test_a_rank_that_ends_with_75_unasked_has_failed(played: Played) -> None:
    played.exited(0, exits.REQUEUE)
    assert played.attempt.is_stopping
    verdict = played.attempt.verdict()
    assert (verdict.code, verdict.first is not None) == (exits.REQUEUE, True)


def test_a_hang_is_named_by_the_rank_that_is_elsewhere(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.launch.supervision.progress.hang", lambda *_: Hang(31.0, 30.0, "run", 12))
    monkeypatch.setattr(
        "muster.launch.supervision.stacks.absent", lambda _: Absent((1,), "rank 1 sleeps in data.py:12")
    )
    played.attempt.tick(time.monotonic())
    assert [node for node, _ in played.orders(Dump)] == [0, 1]
    assert played.orders(StopRanks) == []
    played.attempt.take(0, stack_of(0, "File a"))
    assert played.orders(StopRanks) == []
    played.attempt.take(1, stack_of(1, "File b"))
    assert len(played.orders(StopRanks)) == 2
    played.exited(0, None, sent="SIGTERM")
    played.exited(1, None, sent="SIGKILL")
    verdict = played.attempt.verdict()
    assert verdict.code == exits.TIMEOUT
    assert verdict.message == (
        "rank 1 on node 1 (n1) made no progress for 31 s after step 12: rank 1 sleeps in data.py:12"
    )
    assert verdict.first is not None
    assert verdict.first.last_lines == ["File b"]
    assert [each.rank for each in verdict.victims] == [0]


def test_a_hang_whose_stacks_do_not_come_ends_all_the_same(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.launch.supervision.progress.hang", lambda *_: Hang(31.0, 30.0, "run", 12))
    monkeypatch.setattr("muster.launch.supervision.stacks.absent", lambda _: Absent((), "no stacks came"))
    now = time.monotonic()
    played.attempt.tick(now)
    played.attempt.tick(now + hangs.STACKS_S / 2)
    assert played.orders(StopRanks) == []
    played.attempt.tick(now + hangs.STACKS_S + 0.1)
    assert len(played.orders(StopRanks)) == 2
    verdict = played.attempt.verdict()
    assert verdict.code == exits.TIMEOUT
    assert "node 0 (n0): made no progress for 31 s after step 12, and its keeper does not answer" in verdict.message


def test_the_row_says_from_where_to_where_it_came(played: Played) -> None:
    played.report("loaded", step=10, seconds=0.25, checkpoint="step-00000010.a000")
    played.report("replayed", steps=3, seconds=0.5, compared=3, worst=0.0)
    played.report("saved", step=20, checkpoint="step-00000020.a000", stall_s=0.1, seconds=0.2, bytes=4)
    played.nodes[0].progress = {"steps": 24}  # type: ignore[typeddict-item]
    played.exited(1, None)
    verdict = played.attempt.verdict()
    row = played.attempt.story.row(played.nodes, verdict, "attempt 1 on 2 nodes", time.time())
    assert (row["from"], row["from_step"]) == ("step-00000010.a000", 10)
    assert (row["last_step"], row["saved_step"], row["lost_steps"]) == (24, 20, 4)
    assert row["times"]["load_s"] == 0.25
    assert row["times"]["replay_s"] == 0.5
    assert {"detect_s", "stop_s", "start_s"} <= set(row["times"])
    assert (row["hosts"], row["world_size"], row["mode"]) == (["n0", "n1"], 2, "ddp")
    assert [each["step"] for each in played.events("saved")] == [20]


def test_a_node_that_cannot_end_its_ranks_is_found(played: Played) -> None:
    played.attempt.stop_all(STOP, "test", 0.0)
    played.swept(0)
    assert played.attempt.unswept() == [1]
    assert not played.attempt.is_over()
    played.nodes[1].gone = True
    assert played.attempt.is_over()


def test_a_lost_node_is_the_cause_even_if_its_victims_were_heard_first(played: Played) -> None:
    played.exited(0, 1, kind="RuntimeError", message="Connection reset by peer", peer=True)
    assert played.attempt.is_stopping
    played.attempt.lose(1, "its agent has gone", exits.UNREACHABLE)
    verdict = played.attempt.verdict()
    assert (verdict.code, verdict.message) == (exits.UNREACHABLE, "node 1 (n1): its agent has gone")
    assert [each.rank for each in verdict.victims] == [0]


def test_a_node_that_goes_after_a_failure_is_not_its_cause(played: Played) -> None:
    played.exited(0, None)
    played.attempt.lose(1, "its agent has gone", exits.UNREACHABLE)
    assert played.attempt.verdict().message == "rank 0 on node 0 (n0) was killed by SIGKILL"


def test_a_node_where_something_survives_kill_is_not_used_again(played: Played) -> None:
    played.attempt.stop_all(STOP, "test", 0.0)
    played.swept(0, swept=1)
    played.swept(1, swept=1, left=({"pid": 7, "state": "D", "name": "python", "rank": 1},))
    assert played.attempt.is_over()
    assert played.attempt.unswept() == [1]
    assert "1 process cannot be killed" in played.events("warning")[0]["text"]


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_speaks_of_its_own_ranks_only(played: Played, node: int) -> None:
    with pytest.raises(ProtocolError, match=f"it speaks of rank {1 - node}, which is not its own"):
        played.attempt.take(node, exited(1 - node, 0))
    assert played.attempt.roster.running == {0, 1}


def test_a_rank_that_was_not_asked_to_hold_does_not_stop_the_others(played: Played) -> None:
    with pytest.raises(ProtocolError, match="nobody has asked for it"):
        played.attempt.take(1, Held(0, 23))
    assert played.orders(StopAt) == []


def test_the_farthest_step_that_can_be_held_at_is_followed_by_one_that_can_be_said(played: Played) -> None:
    played.attempt.drain(STOP, "Ctrl-C")
    played.attempt.take(1, decode(encode(Held(0, (1 << 53) - 1)), FROM_AGENT))
    with pytest.raises(ProtocolError):
        decode(encode(Held(0, 1 << 53)), FROM_AGENT)
    assert [decode(encode(order), TO_AGENT) for _, order in played.orders(StopAt)] == [StopAt(0, 1 << 53)] * 2


def test_a_rank_ends_once(played: Played) -> None:
    played.exited(0, 0)
    with pytest.raises(ProtocolError, match="rank 0 ends a second time"):
        played.exited(0, 1)
    assert [each.code for each in played.attempt.endings] == [0]
