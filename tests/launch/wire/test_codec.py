"""Every message survives its way; anything else is one error, which names the field and shows no control codes."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.launch.wire import codec
from muster.launch.wire.codec import ProtocolError, decode, encode, table
from muster.launch.wire.messages import (
    FROM_AGENT,
    TO_AGENT,
    Beat,
    Exited,
    Exits,
    File,
    Heartbeat,
    Held,
    Hello,
    Inspected,
    Log,
    Report,
    Started,
)
from support.messages_drawn import instances

pytestmark = pytest.mark.slow

KINDS = {**FROM_AGENT, **TO_AGENT}
LINE = {"message": "Held", "attempt": 0, "steps": 41}


# What goes in comes out -----------------------------------------------------------------------------------------------


def same(left: object, right: object) -> bool:
    """Whether two messages are equal, NaN being equal to NaN."""
    return type(left) is type(right) and repr(left) == repr(right)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_survives_its_way(name: str, data: st.DataObject) -> None:
    message = data.draw(instances(KINDS[name]))
    line = encode(message)
    assert line.isascii()
    assert (line.count(b"\n"), line[-1:]) == (1, b"\n")
    received = decode(line, FROM_AGENT if name in FROM_AGENT else TO_AGENT)
    if name == "Start":  # what is handed on unread has the lists of JSON where there were tuples
        assert json.loads(encode(received)) == json.loads(line)
    else:
        assert same(received, message)


def test_messages_are_frozen_and_of_one_direction_each() -> None:
    assert not FROM_AGENT.keys() & TO_AGENT.keys()
    assert all(kind.__dataclass_params__.frozen for kind in KINDS.values())  # type: ignore[attr-defined]
    assert all(name == kind.__name__ for name, kind in KINDS.items())


@pytest.mark.parametrize(
    ("kinds", "name"), [(FROM_AGENT, each) for each in TO_AGENT] + [(TO_AGENT, each) for each in FROM_AGENT]
)
def test_a_message_of_the_other_direction_is_none(kinds: dict[str, type], name: str) -> None:
    with pytest.raises(ProtocolError, match=f"expected one of .*, got '{name}'"):
        decode(json.dumps({"message": name}).encode(), kinds)


# What is no message ---------------------------------------------------------------------------------------------------


def fails(line: bytes | dict[str, Any], kinds: dict[str, type] = KINDS) -> str:
    """Return what is said of a line that is not allowed: one short printable line."""
    with pytest.raises(ProtocolError) as caught:
        decode(line if isinstance(line, bytes) else json.dumps(line).encode(), kinds)
    said = str(caught.value)
    assert said.isprintable()
    assert said.isascii() or "…" in said
    return said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "expected JSON"),
        (b"\n", "expected JSON"),
        (b"\xff\xfe\n", "expected JSON"),
        (b"Welcome\n", "expected JSON"),
        (b'{"message": "Held"', "expected JSON"),
        (b'{"message": "Held", "attempt": 0, "steps": 1} {}\n', "expected JSON"),
        (b"[" * 100_000, "expected JSON: nested deeper than 64 levels"),
        (b'{"message":' * 100_000, "expected JSON: nested deeper than 64 levels"),
        (b'{"message": "Held", "attempt": ' + b"9" * 5000 + b', "steps": 1}', "a number of 5000 digits"),
        (b'{"message": "Held", "attempt": -' + b"9" * 5000 + b', "steps": 1}', "a number of 5001 digits"),
        (b"null", "expected one of Hello, "),
        (b"7", "expected one of Hello, "),
        (b'"Held"', "expected one of Hello, "),
        (b'["Held"]', "expected one of Hello, "),
        (b"{}", "expected one of Hello, "),
        (b'{"did": "stop"}', "expected one of Hello, "),
        (b'{"message": null}', "expected one of Hello, "),
        (b'{"message": ["Held"]}', "expected one of Hello, "),
        (b'{"message": {"Held": 1}}', "expected one of Hello, "),
        (b'{"message": "held"}', "got 'held'"),
        (b'{"message": "__init__"}', "got '__init__'"),
        (b'{"message": "CheckpointChosen"}', "got 'CheckpointChosen'"),  # an event of the supervisor's own
        (b'{"message": "Tick"}', "got 'Tick'"),
        (b'{"message": "StopRequest", "by": "me"}', "got 'StopRequest'"),
        (b'{"message": "Failed", "slot": 0, "error": "no"}', "got 'Failed'"),
        (b'{"message": "Refused", "error": "no"}', "got 'Refused'"),
        (b'{"message": "NodeChannelClosed", "slot": 0}', "got 'NodeChannelClosed'"),
        (b'{"message": "__class__"}', "got '__class__'"),
        (b'{"message": "\\u001b]0;title\\u0007"}', r"got '\x1b]0;title\x07'"),
        (b'{"message": "\\ud800"}', r"got '\ud800'"),
    ],
)
def test_a_line_that_is_no_message_is_said(line: bytes, said: str) -> None:
    assert said in fails(line)


@pytest.mark.parametrize("name", KINDS)
def test_unknown_and_missing_fields_are_named(name: str) -> None:
    needed = [each.name for each in dataclasses.fields(KINDS[name]) if each.default is dataclasses.MISSING]
    if needed:
        assert fails({"message": name}) == f"{name}: lacks {', '.join(sorted(needed))}"
    said = fails({"message": name, **dict.fromkeys(needed, 0), "node": 1 << 40, "\x1b[2J": 1})
    assert "has unknown fields" in said


STEP: Any = {"report": "progress", "step": 1, "steps": 2, "loss": math.nan, "rate": math.inf, "unit": "samples/s"}
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Held(0, 3), {"attempt": -1}, "Held.attempt: expected a whole number from 0 to 1048576, got -1"),
    (Held(0, 3), {"attempt": 1 << 21}, "got 2097152"),
    (Held(0, 3), {"attempt": 0.0}, "got 0.0"),
    (Held(0, 3), {"attempt": True}, "got True"),
    (Held(0, 3), {"attempt": "0"}, "got '0'"),
    (Held(0, 3), {"attempt": None}, "got None"),
    (Held(0, 3), {"attempt": [0]}, "got [0]"),
    (Held(0, 3), {"steps": 1 << 54}, "Held.steps: expected a whole number"),
    (Held(0, 3), {"steps": 10**300}, "Held.steps: expected a whole number"),
    (Beat(1.0), {"sent": math.nan}, "Beat.sent: expected a number from 0 to 1e+12, got nan"),
    (Beat(1.0), {"sent": math.inf}, "got inf"),
    (Beat(1.0), {"sent": -0.5}, "got -0.5"),
    (Beat(1.0), {"sent": 1e300}, "got 1e+300"),
    (Beat(1.0), {"sent": 10**399}, "Beat.sent: expected a number"),
    (Beat(1.0), {"sent": "1.0"}, "got '1.0'"),
    (Beat(1.0), {"sent": False}, "got False"),
    (Log(0, 0, "out", ()), {"stream": "both"}, "Log.stream: expected 'out' or 'err', got 'both'"),
    (Log(0, 0, "out", ()), {"stream": ["out"]}, "got ['out']"),
    (Log(0, 0, "out", ()), {"lines": "text"}, "Log.lines: expected a list of at most 65536, got 'text'"),
    (Log(0, 0, "out", ()), {"lines": {"0": "text"}}, "got {'0': 'text'}"),
    (Log(0, 0, "out", ()), {"lines": [7]}, "Log.lines: expected text of at most 1048576 characters, got 7"),
    (Log(0, 0, "out", ()), {"lines": ["x" * ((1 << 20) + 1)]}, "got str of 1048577"),
    (Log(0, 0, "out", ()), {"lines": [""] * 65_537}, "got list of 65537"),
    (File(0, "a", 0, b""), {"data": 7}, "File.data: expected base64, got 7"),
    (File(0, "a", 0, b""), {"data": "a"}, "File.data: expected base64"),
    (File(0, "a", 0, b""), {"data": "größe"}, "File.data: expected base64"),
    (File(0, "a", 0, b""), {"data": "\ud800"}, "File.data: expected base64"),
    (File(0, "a", 0, b""), {"data": [1]}, "File.data: expected base64"),
    (File(0, "a", 0, b""), {"data": "AAAA" * 90_000}, "File.data: expected at most 262144 bytes"),
    (File(0, "a", 0, b""), {"name": "x" * 257}, "File.name: expected text of at most 256 characters, got str of 257"),
    (File(0, "a", 0, b""), {"offset": -1}, "File.offset: expected a whole number"),
    (Started(0, (), 1.0), {"ranks": [[0, 1]]}, "Started.ranks: expected a list of 3, got [0, 1]"),
    (Started(0, (), 1.0), {"ranks": [[0, 1, 2, 3]]}, "Started.ranks: expected a list of 3"),
    (Started(0, (), 1.0), {"ranks": [[0, 0, 1]]}, "expected a whole number from 1 to 2147483648, got 0"),
    (Started(0, (), 1.0), {"ranks": [[-1, 1, 1]]}, "got -1"),
    (Heartbeat(0, 1.0, 1.0, 1.0), {"time": math.nan}, "Heartbeat.time: "),
    (Heartbeat(0, 1.0, 1.0, 1.0), {"progress": {"steps": 1}}, "Heartbeat.progress: "),
    (Exited(0, 0, 0, None, None, 1.0, {}, None, ()), {"rank": -1}, "Exited.rank: expected a whole number"),
    (Exited(0, 0, 0, None, None, 1.0, {}, None, ()), {"ended": math.nan}, "Exited.ended: expected a number"),
    (Exits(0, ()), {"ranks": [{"attempt": 0}]}, "Exits.ranks: lacks"),
    (Report(0, (0,), {"report": "arrived"}), {"report": {"report": "danced"}}, "Report.report"),
    (Report(0, (0,), {"report": "arrived"}), {"report": {}}, "Report.report"),
    (Report(0, (0,), {"report": "arrived"}), {"report": {"report": "first_step", "step": -1}}, "Report.report"),
    (Report(0, (0,), {"report": "arrived"}), {"report": {"report": "arrived", "more": 1}}, "Report.report"),
    (Report(0, (0,), STEP), {"report": {**STEP, "loss": 10**399}}, "Report.report"),
    (Report(0, (0,), STEP), {"report": {**STEP, "loss": None}}, "Report.report"),
    (Exited(0, 0, 0, None, None, 1.0, {}, None, ()), {"signal": "SIGFOO"}, "Exited.signal: expected"),
    (Exited(0, 0, 0, None, None, 1.0, {}, None, ()), {"code": 256}, "Exited.code: expected"),
    (Exited(0, 0, 0, None, None, 1.0, {}, None, ()), {"failure": {"kind": "X"}}, "Exited.failure: "),
    (Exited(0, 0, 0, None, None, 1.0, {}, None, ()), {"failure": None}, "Exited.failure: "),
    (Inspected(0, {}), {"facts": {"cores": -3}}, "Inspected.facts.cores: "),
    (Inspected(0, {}), {"facts": {"memory": {"total_mib": 1}}}, "Inspected.facts.memory: lacks available_mib"),
    (Inspected(0, {}), {"facts": {"failed": {"x" * 300: ""}}}, "Inspected.facts.failed: expected text"),
]


@pytest.mark.parametrize(("message", "changes", "said"), WRONG)
def test_a_field_of_another_type_or_beyond_its_bounds_is_named(
    message: object, changes: dict[str, Any], said: str
) -> None:
    line = json.loads(encode(message))
    assert type(decode(encode(message), KINDS)) is type(message)
    assert said in fails({**line, **changes})


HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\x1b[2J", "\u202e", "x" * 5000, 1 << 60, -1, 10**350, 1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value within a value of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def tried(line: bytes) -> object:
    """Return the message in a line, or the error; there is nothing else."""
    try:
        return decode(line, KINDS)
    except ProtocolError as error:
        return error


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_no_value_in_any_place_does_anything_but_fail_or_fit(name: str, data: st.DataObject) -> None:
    """One value within a good message becomes anything that JSON can say."""
    line = json.loads(encode(data.draw(instances(KINDS[name]))))
    *path, last = data.draw(st.sampled_from([*places(line)[1:], ("another",)]))
    holder = line
    for key in path:
        holder = holder[key]
    holder[last] = data.draw(HOSTILE)
    found = tried(json.dumps(line).encode())
    assert str(found).isprintable() if isinstance(found, ProtocolError) else type(found).__name__ == line["message"]


@settings(max_examples=200)
@given(line=st.binary(max_size=60) | st.text(alphabet='{}[]":,0123456789eE+-.\\u ', max_size=60).map(str.encode))
def test_no_bytes_do_anything_but_fail(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line, KINDS)


@settings(max_examples=200)
@given(data=st.data())
def test_a_good_line_with_a_few_bytes_changed_fails_or_fits(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(KINDS)))
    line = bytearray(encode(data.draw(instances(KINDS[name]))))
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    found = tried(bytes(line))
    assert str(found).isprintable() if isinstance(found, ProtocolError) else type(found) in KINDS.values()


def test_a_lone_surrogate_in_a_text_is_a_text() -> None:
    """Output of ranks and names of files are any bytes; whoever shows them escapes them."""
    assert decode(encode(Log(0, 0, "out", ("\ud800",))), KINDS).lines == ("\ud800",)


def test_what_an_error_repeats_of_a_value_is_short() -> None:
    for value in ("x" * 10**6, ["x"] * 60_000, {str(number): 0 for number in range(10**5)}, [["x" * 50] * 50] * 50):
        assert len(fails({**LINE, "steps": value})) < 200
        assert len(fails({"message": "Held", "attempt": 0, "steps": 1, f"x{value}"[:9000]: 1})) < 200


# A class that cannot be read is our mistake ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Odd:
    """A message with a field of no type of the protocol."""

    value: complex


def test_a_type_that_the_protocol_does_not_have_is_said_when_it_is_first_read() -> None:
    with pytest.raises(TypeError, match="not a type of the protocol"):
        decode(b'{"message": "Odd", "value": 1}', table(Odd))


def test_every_text_and_list_of_every_message_has_a_bound() -> None:
    assert all(bound.most < math.inf for bound in codec.DEFAULTS.values())
    assert {str, bytes, tuple, dict, int, float} == set(codec.DEFAULTS)
    assert Hello in FROM_AGENT.values()
