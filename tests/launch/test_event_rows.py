"""Rows of events.jsonl that are decoded fast have the same values as those that are checked field by field."""

import json
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import append_lines, read_lines
from muster.launch.common.event_rows import decoded, typed_lines
from muster.launch.common.fields import MOST_RANKS, typed

STARTED = {"time": 1e9, "event": "started", "attempt": 0, "node": 1, "host": "n1"}
STARTED |= {"ranks": [[2, 700], [3, 701]], "ticks": [[2, 9], [3, 10]]}
EXITED = {"time": 1e9, "event": "exited", "attempt": 0, "rank": 2, "node": 1, "host": "n1", "code": None}
EXITED |= {"signal": "SIGTERM", "ended": 1e9, "cause": "stopped", "message": "", "last_lines": ["a", "b"]}
EXITED |= {"ours": True, "step": None, "hung": False}
FAST: list[dict[str, Any]] = [
    STARTED,
    EXITED,
    {**EXITED, "rank": None, "code": 69, "signal": None},
    {**EXITED, "code": 1, "signal": None, "step": 41, "ended": 7},
    {**EXITED, "signal": "SIGRTMIN+3"},
]
ODD = {
    "text": 7,
    "rank": MOST_RANKS,
    "node": -1,
    "code": 1 << 16,
    "ended": 1e18,
    "signal": "SIGFOO",
    "last_lines": ["x"] * 1001,
    "message": "m" * 9000,
    "step": 1.5,
    "attempt": True,
    "host": None,
    "ours": 1,
}


def as_lists(row: dict[str, Any]) -> Any:
    return json.loads(json.dumps(row))


@pytest.mark.parametrize("row", FAST)
def test_a_usual_row_is_decoded_as_the_slow_way_does(row: dict[str, Any]) -> None:
    found = decoded(json.dumps(row).encode())
    assert found is not None
    assert as_lists(found) == typed(row)


@pytest.mark.parametrize("row", [STARTED, EXITED])
@pytest.mark.parametrize(("name", "value"), ODD.items())
def test_any_other_value_is_left_to_the_slow_way(row: dict[str, Any], name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_lines(path, [{**row, name: value}, {"event": "joined"}, row])
    assert [as_lists(each) for each in typed_lines(path)] == [typed(each) for each in read_lines(path)]


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[" * 100_000, b'{"event": "exited"}', b'{"event": "exited", "code": 1e999}']
)
def test_a_damaged_line_is_not_decoded(line: bytes) -> None:
    assert decoded(line) is None
