"""One attempt, message by message, without processes: drains, hangs, and what its verdict says."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.files import read_lines
from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.failover import CheckpointSettings, RestartSettings
from muster.jobs.spec.job import Job
from muster.jobs.spec.site import Site
from muster.jobs.spec.train import TrainSettings
from muster.launch.plan.plan import Context
from muster.launch.records.eventlog import EventLog
from muster.launch.records.verdict import Stop
from muster.launch.supervision import hangs
from muster.launch.supervision.attempt import Attempt, Send
from muster.launch.supervision.console import Console
from muster.launch.supervision.progress import Hang
from muster.launch.supervision.run_nodes import NodeState
from muster.launch.supervision.stacks import Blamed
from muster.launch.supervision.story import last_advice
from muster.launch.wire.codec import ProtocolError, decode, encode
from muster.launch.wire.messages import (
    FROM_AGENT,
    TO_AGENT,
    Dump,
    Exits,
    Held,
    Hold,
    Report,
    Stacks,
    StopAt,
    StopRanks,
    Swept,
    Terminated,
    ToAgent,
)
from muster.slurm.notice import Notice
from support.messages import Channel, exited, hello

Order = TypeVar("Order")
STOP = Stop(exits.STOPPED, "stopped by Ctrl-C")


class Played:
    """An attempt of two nodes with a rank each, whose agents are this test."""

    def __init__(
        self,
        folder: Path,
        *,
        saving: bool = True,
        ask: Callable[[bool], None] | None = None,
        adopted: dict[int, int] | None = None,
        rejoin_s: float = 6.0,
    ) -> None:
        self.run = RunDir(folder / "run-1")
        self.run.attempt(0).path.mkdir(parents=True)
        settings = TrainSettings.model_validate({"model": "vgg11", "data": "digits", "steps": 100})
        job = Job(name="demo", nodes=2, kind="train", settings=settings, checkpoint=CheckpointSettings())
        placement = place(job, [Host(f"n{number}", "127.0.0.1") for number in range(2)])
        options = {"saving": saving, "resume": {"checkpoint": "step-00000010.a000", "step": 10}}
        continuing = {"adopted": adopted or {}, "rejoin_s": rejoin_s}
        context = Context(job, Site(), placement, self.run, "/srv", "/opt/python", "m:f", options=options, **continuing)
        nodes = [NodeState(place) for place in placement.nodes]
        for number, node in enumerate(nodes):
            node.hello, node.channel = hello(host=f"n{number}"), Channel()  # type: ignore[assignment]
        self.nodes = nodes
        self.sent: list[tuple[int, ToAgent]] = []
        send: Send = lambda node, message: self.sent.append((node, message))  # noqa: E731
        self.attempt = Attempt(context, nodes, EventLog(self.run), Console(quiet=True), send, 0.0, ask)
        self.attempt.startup.begun = True

    def report(self, what: str, rank: int = 0, **fields: Any) -> None:
        self.attempt.take(rank, Report(0, (rank,), {"report": what, **fields}))  # type: ignore[arg-type, misc]

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


def test_ranks_that_continue_in_place_have_as_long_as_a_restart_would_take(tmp_path: Path) -> None:
    attempt = Played(tmp_path, adopted={0: 0, 1: 1}, rejoin_s=17.0).attempt
    attempt.tick(attempt.started_at + 16.9)
    assert not attempt.is_stopping
    attempt.tick(attempt.started_at + 17.1)
    assert attempt.stop is not None
    assert "did not reach the rendezvous within 17 s" in attempt.stop.message


def test_ranks_that_were_stopped_together_each_have_a_row(played: Played) -> None:
    played.exited(0, 1)
    assert [node for node, _ in played.orders(StopRanks)] == [0, 1]
    stopped = exited(1, None, signal="SIGTERM", sent="SIGTERM", ended=time.time())
    played.attempt.take(1, Exits(0, (stopped,)))
    assert [(row["rank"], row["cause"]) for row in played.events("exited")] == [(0, "own"), (1, "stopped")]
    assert not played.attempt.roster.running
    with pytest.raises(ProtocolError, match="does not run"):
        played.attempt.take(0, Exits(0, (stopped,)))


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
    assert (verdict.code, verdict.message) == (exits.REQUEUE, "the time limit is near; no new checkpoint was saved")
    assert "stopped early, without a save" in last_advice(verdict, played.attempt.story)
    saved = replace(verdict, message="the time limit is near; saved after step 24")
    assert "stopped early, after a save" in last_advice(saved, played.attempt.story)


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


GROW = Stop(exits.REQUEUE, "stopped to continue on 2 nodes")


def test_who_asks_for_an_end_takes_over_the_drain_of_a_run_that_grows(played: Played) -> None:
    assert played.attempt.drain(GROW, "to grow", growing=True)
    assert not played.attempt.drain(GROW, "to grow", growing=True)
    assert played.attempt.drain(STOP, "Ctrl-C")
    assert not played.attempt.drain(GROW, "to grow", growing=True)
    played.exited(0, exits.REQUEUE)
    played.exited(1, exits.REQUEUE)
    assert (played.attempt.verdict().code, played.attempt.growing) == (exits.STOPPED, False)


def test_a_rank_that_fails_while_the_run_saves_to_grow_has_failed(played: Played) -> None:
    played.attempt.drain(GROW, "to grow", growing=True)
    played.exited(1, None)
    assert played.attempt.verdict().code == 137
    assert played.attempt.stop is None


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
        "muster.launch.supervision.stacks.absent", lambda _: Blamed((1,), "rank 1 sleeps in data.py:12")
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
    assert verdict.first.last_lines == ["File b"]
    assert [each.rank for each in verdict.victims] == [0]


def test_a_hang_whose_stacks_do_not_come_ends_all_the_same(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.launch.supervision.progress.hang", lambda *_: Hang(31.0, 30.0, "run", 12))
    monkeypatch.setattr("muster.launch.supervision.stacks.absent", lambda _: Blamed((), "no stacks came"))
    now = time.monotonic()
    played.attempt.tick(now)
    played.attempt.tick(now + hangs.STACKS_S / 2)
    assert played.orders(StopRanks) == []
    played.attempt.tick(now + hangs.STACKS_S + 0.1)
    assert len(played.orders(StopRanks)) == 2
    verdict = played.attempt.verdict()
    assert verdict.code == exits.TIMEOUT
    assert (
        "node 0 (n0): made no progress for 31 s after step 12, and its rank parent does not answer" in verdict.message
    )


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
    assert played.attempt.verdict().message == "rank 0 on node 0 (n0) was killed by SIGKILL; lost too: node 1 (n1)"


def test_a_node_where_something_survives_kill_is_not_used_again(played: Played) -> None:
    played.attempt.stop_all(STOP, "test", 0.0)
    played.swept(0, swept=1)
    played.swept(1, swept=1, left=({"pid": 7, "state": "D", "name": "python", "rank": 1},))
    assert played.attempt.is_over()
    assert played.attempt.unswept() == [1]
    assert "1 process cannot be killed" in played.events("warning")[0]["text"]


def test_the_farthest_step_that_can_be_held_at_is_followed_by_one_that_can_be_said(played: Played) -> None:
    played.attempt.drain(STOP, "Ctrl-C")
    played.attempt.take(1, decode(encode(Held(0, (1 << 53) - 1)), FROM_AGENT))
    with pytest.raises(ProtocolError):
        decode(encode(Held(0, 1 << 53)), FROM_AGENT)
    assert [decode(encode(order), TO_AGENT) for _, order in played.orders(StopAt)] == [StopAt(0, 1 << 53)] * 2


def test_a_drain_that_a_node_began_goes_on_for_the_reason_of_who_asks_next(played: Played) -> None:
    played.attempt.take(1, Terminated(0))
    assert played.attempt.drain(STOP, "SIGTERM")
    assert (len(played.orders(Hold)), played.orders(StopRanks)) == (2, [])
    played.attempt.take(1, Held(0, 23))
    played.report("saved", step=24, checkpoint="step-00000024.a000", stall_s=0.1, seconds=0.2, bytes=4)
    for rank in range(2):
        played.exited(rank, exits.REQUEUE)
    verdict = played.attempt.verdict()
    assert (verdict.code, verdict.message) == (exits.STOPPED, "stopped by Ctrl-C; saved after step 24")


def terminated(played: Played) -> None:
    played.attempt.take(0, Terminated(0))


def killed(played: Played) -> None:
    played.exited(1, None, sent=None)  # by SIGKILL: nobody is asked
    assert played.attempt.is_stopping


def died_of_term(played: Played) -> None:
    ending = exited(0, None, signal="SIGTERM", sent=None, ended=time.time())
    played.attempt.take(0, ending)


@pytest.fixture
def asked(tmp_path: Path) -> Played:
    """An attempt that saves nothing, inside a scheduler's job; `limits` are the questions."""
    limits: list[bool] = []
    played = Played(tmp_path, saving=False, ask=limits.append).working()
    played.limits = limits  # type: ignore[attr-defined]
    return played


def shell_died_of_term(played: Played) -> None:
    played.attempt.take(0, exited(0, 143, ended=time.time()))


@pytest.mark.parametrize("first", [terminated, died_of_term, shell_died_of_term])
def test_ranks_have_the_whole_grace_of_a_preemption(asked: Played, first: Callable[[Played], None]) -> None:
    first(asked)
    terminated(asked)
    assert asked.limits == [False]  # type: ignore[attr-defined]
    assert asked.orders(StopRanks) == []
    assert not asked.attempt.is_over()
    asked.attempt.noticed(Notice("preempted", time.time() + 40.0))
    (_, order), _ = asked.orders(StopRanks)
    assert order.reason == "preempted"
    assert 34.0 < order.grace_s <= 35.0
    verdict = asked.attempt.verdict()
    assert (verdict.code, verdict.message) == (exits.REQUEUE, "Slurm gives the nodes to another job")


def test_a_rank_that_fails_while_the_scheduler_is_asked_waits_for_the_answer(asked: Played) -> None:
    terminated(asked)
    asked.exited(1, 1)
    assert asked.orders(StopRanks) == []
    asked.attempt.noticed(Notice("preempted", time.time() + 40.0))
    assert asked.attempt.verdict().code == exits.REQUEUE


def test_ranks_that_all_die_of_a_preemption_are_queued_again(asked: Played) -> None:
    for rank in range(2):
        asked.attempt.take(rank, exited(rank, None, signal="SIGTERM", sent=None, ended=time.time()))
    assert not asked.attempt.is_over()
    asked.attempt.noticed(Notice("preempted", time.time() + 40.0))
    for node in range(2):
        asked.swept(node)
    assert (asked.attempt.is_over(), asked.attempt.verdict().code) == (True, exits.REQUEUE)


@pytest.mark.parametrize(("first", "reason"), [(terminated, "stopped"), (died_of_term, "failure")])
def test_a_sigterm_that_no_scheduler_sent_stops_with_the_jobs_grace(
    asked: Played, first: Callable[[Played], None], reason: str
) -> None:
    first(asked)
    asked.attempt.noticed(None)
    assert [(order.reason, order.grace_s) for _, order in asked.orders(StopRanks)] == [(reason, 5.0)] * 2


def test_a_rank_that_was_killed_is_asked_about_nowhere(asked: Played) -> None:
    killed(asked)
    assert asked.limits == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(("restart", "code"), [(None, exits.TIMEOUT), (RestartSettings(), exits.REQUEUE)])
def test_at_the_time_limit_a_program_is_queued_again_where_the_job_has_restart(
    asked: Played, restart: RestartSettings | None, code: int
) -> None:
    job = asked.attempt.job.model_copy(update={"kind": "command", "restart": restart})
    asked.attempt.context = replace(asked.attempt.context, job=job, entry=None)
    asked.attempt.ask_first(lambda: None, limit=True)
    assert asked.limits == [True]  # type: ignore[attr-defined]
    asked.attempt.noticed(Notice("time limit", time.time() + 40.0))
    assert (asked.attempt.verdict().code, asked.orders(StopRanks)[0][1].reason) == (code, "time limit")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_stopped_attempt_is_over_once_every_node_has_swept_in_any_order(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    played = Played(tmp_path).working()
    played.attempt.stop_all(STOP, "Ctrl-C", 1.0)
    for node in order:
        assert not played.attempt.is_over()
        played.attempt.take(node, Swept(0, 1, ()))
    assert played.attempt.is_over()
