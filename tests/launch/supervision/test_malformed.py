"""A node that sends what it must not costs that node, with a verdict that says so; the run goes on without it.

Real supervisor, TCP and handshake; the agents are coroutines of this process, and one of them misbehaves.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.basics import exits
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.supervision import inbox, reserve, supervisor
from muster.launch.supervision.supervisor import Supervisor
from muster.launch.wire.channel import LINE_BYTES
from muster.launch.wire.codec import encode
from muster.launch.wire.messages import (
    FROM_AGENT,
    Broken,
    File,
    Heartbeat,
    Held,
    Inspected,
    Log,
    Prepared,
    Reached,
    Ready,
    Report,
    Stacks,
    Started,
    Swept,
)
from support.fake_agents import FakeAgent, live
from support.messages import exited, hello
from support.messages_drawn import instances

pytestmark = pytest.mark.slow

ODD = 1  # the node that misbehaves: ranks 2 and 3 are its own
PROTOCOL = "its agent broke the protocol: "
REACHED = Reached(0, "eth1", "10.10.1.2", "", "code", "shared", "/runs", "")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "TICK_S", 0.02)
    monkeypatch.setattr(reserve, "ORPHANS_S", 0.0)
    monkeypatch.setattr(supervisor, "raise_open_files", lambda: None)


def line(**fields: Any) -> bytes:
    return (json.dumps(fields) + "\n").encode()


def changed(message: object, **changes: Any) -> bytes:
    """A message as a line, with fields that its class would not take."""
    return line(**{**json.loads(encode(message)), **changes})


def sent(at: str, *lines: bytes) -> Callable[[str], tuple[bytes, ...]]:
    """Send lines at one moment of an agent's life."""
    return lambda moment: lines if moment == at else ()


def rows(supervised: Supervisor) -> list[dict[str, Any]]:
    return list(read_lines(supervised.run_dir.attempts))


def went_on(folder: Path, at: str, *lines: bytes, odd: int = ODD, spares: int = 1) -> str:
    """Let one node of a run misbehave; the run is to go on without it. Return why it was lost."""
    agents = [FakeAgent(node, sent(at, *lines) if node == odd else lambda _: ()) for node in range(2 + spares)]
    verdict, supervised = live(folder, *agents, spares=spares)
    assert (verdict.code, verdict.message) == (exits.DONE, "4 ranks ended with 0")
    first, last = rows(supervised)
    assert (first["class"], first["code"], first["first"]["node"]) == ("unreachable", exits.UNREACHABLE, odd)
    assert first["message"].startswith(f"node {odd} (n{odd}): ")
    assert first["message"].isprintable()
    expected = [f"n{node}" for node in range(2 + spares) if spares == 0 or node != odd]
    assert (last["class"], last["hosts"]) == ("done", expected)
    return str(first["message"]).partition(": ")[2]


# What is no message of the protocol, or has a field beyond its bounds -------------------------------------------------

# A few of every sort: wire/test_codec.py has the table of all that is no message.
MALFORMED: dict[str, tuple[bytes, str]] = {
    "words": (b"Segmentation fault\n", "expected JSON"),
    "nested without end": (b"[" * 100_000 + b"\n", "expected JSON: nested deeper than 64 levels"),
    "a line without an end": (b"x" * (2 * LINE_BYTES + 1), "its line is too long"),
    "a kind of the other direction": (line(message="StopRanks", attempt=0, grace_s=0), "got 'StopRanks'"),
    "an event of the supervisor's own: a failure": (line(message="Failed", slot=0, error="no"), "got 'Failed'"),
    "a kind with escape sequences": (line(message="\x1b]0;owned\x07"), r"got '\x1b]0;owned\x07'"),
    "another node's number": (changed(Held(0, 3), node=0), "Held: has unknown fields ['node']"),
    "steps beyond all bounds": (changed(Held(0, 3), steps=1 << 60), "Held.steps: expected a whole number"),
    "half a failure": (changed(exited(2, 1), failure={"kind": "X"}), "Exited.failure: "),
    "a time that is no number": (changed(Heartbeat(0, 1.0, 1.0, 1.0), time=float("nan")), "Heartbeat.time: "),
    "progress of another shape": (changed(Heartbeat(0, 1.0, 1.0, 1.0), progress={"steps": 1}), "Heartbeat.progress: "),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_message_costs_its_node(tmp_path: Path, kind: str) -> None:
    bad, said = MALFORMED[kind]
    why = went_on(tmp_path, "started", bad)
    assert why.startswith(PROTOCOL)
    assert said in why


# What is well-formed, and not this node's to say, or not now ----------------------------------------------------------

ILL_TIMED: dict[str, tuple[tuple[bytes, ...], str]] = {
    "a rank of another node ends": ((encode(exited(0, 0)),), "rank 0, which it does not run"),
    "a rank that there is not ends": ((encode(exited(99, 0)),), "rank 99, which it does not run"),
    "a rank ends twice": ((encode(exited(2, 0)), encode(exited(2, 0))), "rank 2 has ended already"),
    "a report of another node's rank": (
        (encode(Report(0, (1,), {"report": "joined"})),),
        "rank 1, which it does not run",
    ),
    "processes of another node": ((encode(Started(0, ((0, 1, 1),), 1.0)),), "rank 0, which it does not run"),
    "output of another node's rank": ((encode(Log(0, 0, "out", ("forged",))),), "rank 0, which it does not run"),
    "stacks of another node's rank": (
        (encode(Stacks(0, ({"rank": 0, "state": "S", "lines": ()},))),),
        "rank 0, which it does not run",
    ),
    "another port for the store": ((encode(Prepared(0, 4343, "", ())),), "Prepared: it was not requested"),
    "the way to the store, once more": ((encode(REACHED),), "Reached: it was not requested"),
    "a rank waits that nobody asked to": ((encode(Held(0, 3)),), "Held: it was not requested"),
    "a second greeting": ((encode(hello(host="n9")),), "Hello: it has greeted already"),
    "a file elsewhere": ((encode(File(0, "../../passwd", 0, b"x")),), "a file that is not its own: '../../passwd'"),
    "a file of the supervisor's": ((encode(File(0, "events.jsonl", 0, b"x")),), "a file that is not its own"),
    "a file far beyond its end": ((encode(File(0, "metrics.jsonl", 1 << 40, b"x")),), "File: "),
}


@pytest.mark.parametrize("kind", ILL_TIMED)
@pytest.mark.parametrize("spares", [1, 0])
def test_a_message_that_is_not_a_nodes_to_send_costs_that_node(tmp_path: Path, kind: str, spares: int) -> None:
    """A spare takes its place; without one, its agent is started again."""
    lines, said = ILL_TIMED[kind]
    assert said in went_on(tmp_path, "started", *lines, spares=spares)


def test_node_0_is_not_believed_either(tmp_path: Path) -> None:
    """The supervisor's own host: whoever holds its key is only this node as well."""
    why = went_on(tmp_path, "started", encode(Prepared(0, 4343, "", ())), odd=0)
    assert "Prepared: it was not requested" in why


def test_one_that_misbehaves_while_it_is_stopped_is_not_used_again(tmp_path: Path) -> None:
    lines = {"started": (encode(Broken(0, "a disk", 1)),), "stopping": (encode(exited(0, 0)),)}
    verdict, supervised = live(tmp_path, FakeAgent(0), FakeAgent(1, lambda at: lines.get(at, ())), FakeAgent(2))
    warned = [row["text"] for row in read_lines(supervised.run_dir.events) if row["event"] == "warning"]
    assert warned == [f"node 1: {PROTOCOL}Exited: it reports about rank 0, which it does not run"]
    first, last = rows(supervised)
    assert (verdict.code, first["message"], last["hosts"]) == (exits.DONE, "node 1 (n1): a disk", ["n0", "n2"])


def test_a_node_that_is_lost_between_two_attempts_is_not_waited_for(tmp_path: Path) -> None:
    """It was chosen for the next attempt: what it sent was still to be read."""
    over = Broken(0, "a disk", 1, gone=True)
    lines = {"started": (encode(exited(2, 1)),), "stopping": (encode(over), encode(hello()))}
    agents = [FakeAgent(0, ends=True), FakeAgent(1, lambda at: lines.get(at, ())), FakeAgent(2, ends=True)]
    verdict, supervised = live(tmp_path, *agents)
    assert [(row["class"], row["hosts"]) for row in rows(supervised)] == [
        ("failed", ["n0", "n1"]),
        ("unreachable", ["n0", "n1"]),
        ("done", ["n0", "n2"]),
    ]
    assert verdict.code == exits.DONE


def test_what_is_forged_of_other_nodes_leaves_no_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    went_on(tmp_path, "started", encode(Log(0, 0, "out", ("forged",))))
    assert "forged" not in capfd.readouterr().out


def test_a_file_that_was_refused_is_not_there(tmp_path: Path) -> None:
    went_on(tmp_path, "started", *ILL_TIMED["a file far beyond its end"][0])
    (run,) = (RunDir(path) for path in tmp_path.iterdir())
    assert not run.metrics.exists() or run.metrics.stat().st_size == 0


# At the start ---------------------------------------------------------------------------------------------------------

FIRST: dict[str, bytes] = {
    "words": b"Welcome to n1!\n",
    "bytes": b"\xff\xfe\n",
    "another message": encode(Held(0, 3)),
    "a greeting of the protocol before": line(did="hello", node=1, host="n1"),
    "a greeting that claims another node": changed(hello(), node=0),
    "a greeting that claims node -1": changed(hello(), node=-1),
    "a greeting without a host": line(**{k: v for k, v in json.loads(encode(hello())).items() if k != "host"}),
    "a greeting with a host of 300 characters": changed(hello(), host="x" * 300),
    "a greeting with a core of -1": changed(hello(), cores=[-1]),
    "a greeting with a process 0": changed(hello(), pid=0),
    "a greeting with a time that is no number": changed(hello(), time=float("inf")),
}


@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_that_does_not_greet_is_named(tmp_path: Path, kind: str, spares: int) -> None:
    """As one that cannot be reached is: without a spare it ends the start, for its name may be wrong."""
    others = [FakeAgent(node, ends=True) for node in (0, 2)[: 1 + spares]]
    verdict, supervised = live(tmp_path, FakeAgent(ODD, first=FIRST[kind]), *others, spares=spares)
    first, *more = rows(supervised)
    assert first["class"] == "unreachable"
    assert first["message"].startswith("node 1: its agent closed the connection before its greeting: ")
    assert first["message"].splitlines()[1:] == ["to continue without them: --exclude n1"]
    assert all(text.isprintable() for text in first["message"].splitlines())
    assert verdict.code == (exits.DONE if spares else exits.UNREACHABLE)
    assert [row["hosts"] for row in more] == [["n0", "n2"]] * spares


@pytest.mark.parametrize(
    ("at", "bad", "said"),
    [
        ("greeted", Held(0, 3), "Held: no rank has been started"),
        ("greeted", Prepared(0, 4343, "", ()), "Prepared: it was not requested"),
        ("greeted", REACHED, "Reached: it was not requested"),
        ("greeted", exited(2, 1), "Exited: no rank has been started"),
        ("greeted", Started(0, ((2, 1, 1),), 1.0), "Started: no rank has been started"),
        ("greeted", Report(0, (2,), {"report": "joined"}), "Report: no rank has been started"),
        ("greeted", Log(0, 2, "out", ("early",)), "Log: no rank has been started"),
        ("greeted", File(0, "metrics.jsonl", 0, b"x"), "File: no rank has been started"),
        ("greeted", hello(), "Hello: it has greeted already"),
        ("reached", REACHED, "Reached: it was not requested"),
        ("reached", Prepared(0, 4343, "", ()), "Prepared: it was not requested"),
    ],
)
@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_that_misbehaves_while_a_run_starts_is_lost_and_named(
    tmp_path: Path, at: str, bad: object, said: str, spares: int
) -> None:
    others = [FakeAgent(node, ends=True) for node in (0, 2)[: 1 + spares]]
    verdict, supervised = live(tmp_path, FakeAgent(ODD, sent(at, encode(bad)), ends=True), *others, spares=spares)
    first, *more = rows(supervised)
    assert (first["class"], first["message"]) == ("unreachable", f"node 1 (n1): {PROTOCOL}{said}")
    assert verdict.code == (exits.DONE if more else exits.UNREACHABLE)
    assert more or not spares


# A clock that is set during the run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_node_whose_clock_was_set_is_left_out_of_the_next_start(tmp_path: Path, ahead_s: float) -> None:
    def set_clock(moment: str) -> tuple[bytes, ...]:
        if moment != "started":
            return ()
        odd.ahead_s = ahead_s
        odd.running.remove(2)
        return (encode(exited(2, 1)),)

    odd = FakeAgent(ODD, set_clock)
    verdict, supervised = live(tmp_path, FakeAgent(0), odd, FakeAgent(2))
    failed, unfit, done = rows(supervised)
    assert (failed["class"], failed["hosts"]) == ("failed", ["n0", "n1"])
    assert (unfit["class"], unfit["hosts"], unfit["first"]["node"]) == ("unreachable", ["n0", "n1"], ODD)
    assert unfit["message"] == f"node 1 (n1): its clock is off by {ahead_s:+.0f} s; set it (chronyc makestep)"
    assert (done["class"], done["hosts"], verdict.code) == ("done", ["n0", "n2"], exits.DONE)


# What is allowed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        exited(0, 0, attempt=7),  # of another attempt: late, or never
        Report(7, (0,), {"report": "joined"}),
        Heartbeat(7, 1.0, 1.0, 1.0),
        Inspected(0, {}),
        Ready(0, 1),
        Stacks(0, ()),
        Report(0, (2,), {"report": "missed", "step": 1, "missed": 1, "message": "a full disk"}),
    ],
)
def test_what_is_allowed_costs_nobody_anything(tmp_path: Path, message: object) -> None:
    agents = [FakeAgent(0, ends=True), FakeAgent(1, sent("started", encode(message)), ends=True)]
    verdict, supervised = live(tmp_path, *agents, spares=0)
    assert (verdict.code, len(rows(supervised))) == (exits.DONE, 1)


def test_a_piece_of_a_file_arrives_as_it_was_sent(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10
    pieces = [File(0, "attempt-000/rank-00002.out", offset, data[offset : offset + 1000]) for offset in (0, 1000, 2000)]
    agents = [FakeAgent(0, ends=True), FakeAgent(1, sent("started", *map(encode, pieces)), ends=True)]
    verdict, supervised = live(tmp_path, *agents, spares=0)
    assert verdict.code == exits.DONE
    assert supervised.run_dir.attempt(0).out(2).read_bytes() == data


def test_a_node_that_cannot_kill_something_is_not_used_again(tmp_path: Path) -> None:
    left = Swept(0, 1, ({"pid": 7, "state": "D", "name": "\x1b[2J", "rank": None},))
    lines = {"started": (encode(exited(2, 1)),), "stopping": (encode(left),)}
    agents = [FakeAgent(0), FakeAgent(1, lambda moment: lines.get(moment, ())), FakeAgent(2)]
    verdict, supervised = live(tmp_path, *agents)
    assert verdict.code == exits.DONE
    assert rows(supervised)[-1]["hosts"] == ["n0", "n2"]


# Whatever it sends ----------------------------------------------------------------------------------------------------


@st.composite
def aimed(draw: st.DrawFn) -> object:
    """A drawn message that is mostly about this attempt, and about ranks that there are."""
    kind = draw(st.sampled_from([kind for name, kind in FROM_AGENT.items() if name != "Terminated"]))
    message = draw(instances(kind))
    near = {"attempt": st.sampled_from([0, 0, 0, 1]), "rank": st.integers(0, 4)}
    fields = {each.name for each in dataclasses.fields(kind)}
    return dataclasses.replace(message, **{name: draw(values) for name, values in near.items() if name in fields})


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_message_of_a_node_does_more_than_cost_that_node(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Up to three drawn messages at a drawn moment; the run ends by itself, and blames nobody else.

    That a scheduler ends the run, a node may say: Terminated is left out.
    """
    drawn = data.draw(st.lists(aimed(), min_size=1, max_size=3))
    at = data.draw(st.sampled_from(["greeted", "prepared", "reached", "started", "stopping"]))
    odd = data.draw(st.sampled_from([0, 1]))
    fails = (encode(exited(2 * odd, 1)),) if at == "stopping" else ()
    lines = {"started": fails, at: tuple(map(encode, drawn))}
    folder = tmp_path_factory.mktemp("run")
    agents = [FakeAgent(node, ends=True) for node in (1 - odd, 2)]
    verdict, supervised = live(folder, FakeAgent(odd, lambda moment: lines.get(moment, ()), ends=not fails), *agents)
    first, *more = rows(supervised)
    assert first["first"] is None or first["first"]["node"] == odd, (drawn, first)
    assert verdict.code == exits.DONE or not more
