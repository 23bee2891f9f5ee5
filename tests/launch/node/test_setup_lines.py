"""What setup lines leave in the environment, read from a real shell."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import RefusedError
from muster.launch.node import setup_lines
from muster.launch.node.setup_lines import Changes, changes, with_changes

OURS = "/srv/muster/muster/importable"


def left_by(folder: Path, *lines: str, **env: str) -> Changes:
    return asyncio.run(setup_lines.run(lines, folder / "setup", str(folder), env))


def test_exports_sources_and_unsets_are_kept_and_the_shells_own_variables_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GONE", "1")
    (tmp_path / "activate").write_text("export PATH=/opt/env/bin:$PATH\nHIDDEN=1\n")
    found = left_by(
        tmp_path,
        "source ./activate",
        "export TEXT=$'two\\nlines = \"größe\"'",
        "unset GONE",
        "export SAME=given LATER=after",
        "cd /; echo said",
        PATH=f"/usr/bin:{os.environ['PATH']}",
        SAME="given",
        LATER="before",
    )
    assert found == {
        "PATH": f"/opt/env/bin:/usr/bin:{os.environ['PATH']}",
        "TEXT": 'two\nlines = "größe"',
        "LATER": "after",
        "GONE": None,
    }
    assert (tmp_path / "setup").read_text() == "said\n"


def test_bytes_that_are_no_text_come_back_as_they_are(tmp_path: Path) -> None:
    assert os.fsencode(str(left_by(tmp_path, "export ODD=$'\\xff'")["ODD"])) == b"\xff"


def test_lines_that_end_the_shell_early_keep_what_they_have_exported(tmp_path: Path) -> None:
    assert left_by(tmp_path, "export A=1", "exit 0", "export B=2") == {"A": "1"}


@pytest.mark.parametrize("line", ["exec true", "trap - EXIT", "trap 'rm -f x' EXIT"])
def test_lines_whose_environment_cannot_be_read_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(RefusedError, match="the environment after them cannot be read"):
        left_by(tmp_path, line)


def test_a_process_that_the_lines_leave_behind_holds_nobody_up(tmp_path: Path) -> None:
    found = left_by(tmp_path, "sleep 1000 & export PID=$!")
    os.kill(int(str(found["PID"])), 9)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("export PYTHONPATH=/mine:$PYTHONPATH", f"{OURS}:/mine:/site"),
        ("export PYTHONPATH=/mine", f"{OURS}:/mine"),
        ("unset PYTHONPATH", OURS),
    ],
)
def test_the_folder_that_shows_muster_stays_first(tmp_path: Path, line: str, expected: str) -> None:
    assert left_by(tmp_path, line, PYTHONPATH=f"{OURS}:/site") == {"PYTHONPATH": expected}


def test_what_muster_says_itself_is_not_the_setup_lines_to_change(tmp_path: Path) -> None:
    found = left_by(tmp_path, "export MUSTER_RUN_ID=x MUSTER_MINE=1", MUSTER_RUN_ID="run")
    assert found == {"MUSTER_MINE": "1"}


ENVIRONMENTS = st.dictionaries(st.sampled_from("ABCDE"), st.text("xyz", max_size=2))


@given(ENVIRONMENTS, ENVIRONMENTS)
def test_changes_lead_from_one_environment_to_the_other(before: dict[str, str], after: dict[str, str]) -> None:
    start = with_changes({"rank": 0, "env": {}}, changes(before, after, {}))
    kept = {name: value for name, value in before.items() if name not in start["unset"]}
    assert {**kept, **start["env"]} == after


def test_what_a_rank_is_given_wins_over_the_setup_lines() -> None:
    start = with_changes({"rank": 0, "env": {"RANK": "0"}}, {"RANK": "7", "A": "1", "B": None})
    assert start == {"rank": 0, "env": {"RANK": "0", "A": "1"}, "unset": ["B"]}
