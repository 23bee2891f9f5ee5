"""Between two attempts, without a node: how long a lost one is tried again, and what is said when it stays away."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.failover import RestartSettings
from muster.jobs.spec.job import Job
from muster.jobs.spec.site import Site
from muster.jobs.spec.train import TrainSettings
from muster.launch.plan.plan import Context
from muster.launch.records.verdict import Verdict
from muster.launch.supervision import inbox, reserve
from muster.launch.supervision import supervisor as module
from muster.launch.supervision.console import Console
from muster.launch.supervision.inbox import Heard
from muster.launch.supervision.recovery import NodeChoice, Past
from muster.launch.supervision.supervisor import Supervisor
from muster.launch.wire.messages import Heartbeat, ToAgent
from support.messages import hello

LOST = 3


class Channel:
    """Takes whatever is posted; nobody reads it."""

    def __init__(self) -> None:
        self.unhandled = asyncio.Semaphore(0)

    def post(self, message: ToAgent) -> None:
        pass


class Boots:
    """A transport to nodes of which one answers at the n-th start of its agent, and refuses before with an error."""

    name = "ssh"
    patience_s = 0.0

    def __init__(self, answers_at: int, error: MusterError) -> None:
        self.answers_at, self.error = answers_at, error
        self.starts = 0

    def printed(self, slot: int) -> str:
        return ""

    async def restart(self, slot: int, gate: Any) -> None:
        self.starts += 1
        if self.starts < self.answers_at:
            gate.failed(slot, self.error)
        else:
            gate.put(Heard(slot, hello(host=f"n{slot}"), Channel(), 1.0))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Supervise a training on 4 nodes, one of which was lost in the attempt before."""
    for name in ("REVIVE_S", "ORPHANS_S", "FENCE_S"):
        monkeypatch.setattr(reserve, name, 0.0)
    monkeypatch.setattr(module, "FENCE_S", 0.0)
    monkeypatch.setattr(inbox, "TICK_S", 0.02)

    def supervise(transport: Boots, *, min_nodes: int | None = None, start_timeout_s: float = 60.0) -> Supervisor:
        settings = TrainSettings.model_validate(
            {"model": "gpt-nano", "data": "synthetic", "parallel": {"data": 2, "pipe": 2}}
        )
        job = Job(
            name="demo",
            nodes=4,
            kind="train",
            settings=settings,
            restart=RestartSettings.model_validate({"min_nodes": min_nodes}),
            start_timeout_s=start_timeout_s,
        )
        run = RunDir(tmp_path / "run-1")
        run.path.mkdir()
        placement = place(job, [Host(f"n{number}", f"10.10.1.{number + 1}") for number in range(4)])
        context = Context(
            job, Site(), placement, run, "/srv/job", "/opt/python", "muster.jobs.train.main:run_rank", remote=True
        )
        made = Supervisor(context, transport, Console())  # type: ignore[arg-type]
        for slot, node in enumerate(made.run_nodes.nodes):
            node.channel, node.hello, node.gone = Channel(), hello(host=f"n{slot}"), slot == LOST  # type: ignore[assignment]
        # an attempt that has ended: everything of it was stopped
        over = {"is_over": lambda: True, "is_stopping": True, "startup": SimpleNamespace(begun=True, complete=True)}
        story = SimpleNamespace(
            last_step=lambda nodes: 120, saved_step=None, copied_step=None, times={}, has_session=False, start_s=17.0
        )
        alone = {"regrouping": None, "context": SimpleNamespace(adopted={})}
        stopped = {"tick": lambda now, late_s: None, "growing": False, "stop": None, "draining": None}
        roster = SimpleNamespace(nodes=made.run_nodes.nodes)
        made.attempt = SimpleNamespace(
            **over, **stopped, **alone, story=story, roster=roster, hangs=SimpleNamespace(hang=None)
        )  # type: ignore[assignment]
        made.succession.begun = True
        made.succession.past.append(Past(Verdict(exits.UNREACHABLE, "silent"), LOST, 120, committed=True))
        return made

    return supervise


def revive(supervisor: Supervisor) -> Any:
    """Wait for the lost node; return why it did not come back."""

    async def work() -> None:
        supervisor.inbox.tick()
        await supervisor._revive()
        supervisor.inbox.close(0)

    asyncio.run(work())
    return supervisor.run_nodes.nodes[LOST].failure


def test_the_limit_for_ranks_that_continue_is_the_longest_start(make: Any) -> None:
    supervisor = make(Boots(1, UnreachableError("n3: connection refused")))
    supervisor._turn((0, 1, 2), {})
    supervisor.attempt.story.start_s = 2.0  # the next attempt, in place, was faster
    supervisor._turn((0, 1, 2), {})
    assert supervisor.context.rejoin_s == 17.0


def test_a_lost_node_that_boots_is_tried_until_its_agent_answers(make: Any) -> None:
    transport = Boots(3, UnreachableError("n3: connection refused"))
    supervisor = make(transport)
    assert revive(supervisor) is None
    assert (transport.starts, supervisor.run_nodes.nodes[LOST].is_alive) == (3, True)


def test_a_lost_node_that_refuses_for_good_is_not_tried_again(make: Any) -> None:
    transport = Boots(9, RefusedError("n3: it refused our key"))
    assert str(revive(make(transport))) == "n3: it refused our key"
    assert transport.starts == 1


def test_a_lost_node_that_stays_away_is_unreachable_and_the_last_reason_is_told(make: Any) -> None:
    failure = revive(make(Boots(10**9, UnreachableError("n3: no route to host")), start_timeout_s=0.5))
    assert isinstance(failure, UnreachableError)
    waited = "n3: its agent did not answer within 0.5 s (start_timeout_s)"
    assert str(failure) == f"{waited}; last error: n3: no route to host"


def test_between_two_attempts_no_clock_is_watched_because_nodes_have_other_numbers(make: Any) -> None:
    supervisor, watched = make(Boots(9, UnreachableError(""))), list[int]()
    supervisor.attempt.startup.watch_clock = watched.append
    for attempt, number in ((1, 0), (1, 1)):  # the next attempt is placed, then begun
        supervisor.context = replace(supervisor.context, attempt=attempt)
        supervisor.attempt.number = number
        supervisor._hear(Heard(2, Heartbeat(0, 1.0, 1.0, 1.0), supervisor.run_nodes.nodes[2].channel, 1.0))
        assert watched == [2] * number


@pytest.mark.parametrize(
    ("min_nodes", "why"),
    [
        (None, "3 nodes left, and the job needs 4 (restart.min_nodes)"),
        (
            1,
            "3 nodes left, on which the job cannot continue: train.parallel: data 2 x pipe 2 makes 4 ranks, but the "
            "job has 3; set nodes and ranks_per_node to match",
        ),
    ],
)
def test_without_a_node_that_stayed_away_the_run_ends_and_says_what_the_job_needs(
    make: Any, min_nodes: int | None, why: str
) -> None:
    supervisor = make(Boots(9, UnreachableError("")), min_nodes=min_nodes)
    slots = tuple(range(4))
    begun = supervisor.succession.follow(supervisor.attempt, slots, Verdict(exits.UNREACHABLE, "silent"), asked=False)
    assert begun[1] == NodeChoice(slots, (LOST,)), "it is waited for first"
    supervisor.reserve.give_up("no route to host")
    supervisor.attempt.startup.begun = False
    verdict = Verdict(exits.UNREACHABLE, "n3: no route to host\nto continue without them: --exclude n3")
    decision, choice = supervisor.succession.follow(supervisor.attempt, slots, verdict, asked=False)
    assert (choice, decision.again, decision.verdict.code) == (None, False, exits.UNREACHABLE)
    assert decision.verdict.message == f"n3: no route to host; {why}\nto continue without them: --exclude n3"


def test_a_signal_that_comes_after_the_end_ends_nothing() -> None:
    """Slurm's signal before the time limit, while the job is being queued again."""
    code = """
import asyncio, os, signal
from pathlib import Path
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.supervision.inbox import Inbox
async def main():
    inbox = Inbox()
    inbox.listen_for_signals(RunDir(Path("run")))
    inbox.close(0)
asyncio.run(main())
for number in (signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
print("it lives")
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, cwd=CODE_ROOT)
    assert (done.returncode, done.stdout) == (0, "it lives\n"), done.stderr
