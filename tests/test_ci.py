"""What `.ci/run` does when tests fail: it runs a few of them once more, loudly; the rest of it is lines of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = (Path(__file__).resolve().parents[1] / ".ci/run").read_text(encoding="utf-8")
HEADING = "!! FAILED THE FIRST TIME: "
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range(8))
def test_of_chance(number, pytestconfig):
    runs = pathlib.Path(f"runs-{number}")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) > pathlib.Path("failures").read_text().split()[number].count("F")
"""


@pytest.mark.parametrize(
    ("failures", "code", "again"),
    [
        (". . . . . . . .", 0, None),
        (". F . . . F . .", 0, [1, 5]),
        (". F . . . FF . .", 1, [1, 5]),
        ("F F F F F F . .", 1, None),
    ],
    ids=["none", "two by chance", "one of two again", "six"],
)
def test_up_to_five_failed_tests_are_run_once_more_and_named(
    tmp_path: Path, failures: str, code: int, again: list[int] | None
) -> None:
    functions = re.findall(r"^(?:stage|tests)\(\) \{.*?\}$", SCRIPT, re.MULTILINE | re.DOTALL)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, command in (("python", ""), ("pytest", " -m pytest -q")):
        (tmp_path / f".venv/bin/{name}").write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
        (tmp_path / f".venv/bin/{name}").chmod(0o755)
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "failures").write_text(failures)
    script = "\n".join(
        [
            "set -euo pipefail",
            *functions,
            "tests 'true && .venv/bin/pytest -k chance' .pytest_cache -k chance",
            "echo on",
        ]
    )
    ended = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    assert ended.stdout.endswith("on\n") == (code == 0)
    assert (HEADING in ended.stdout) == (again is not None)
    named = [line for line in ended.stdout.splitlines() if line.startswith("!! test_them.py")]
    assert named == [f"!! test_them.py::test_of_chance[{number}]" for number in again or []]
    times = [len((tmp_path / f"runs-{number}").read_text()) for number in range(8)]
    assert times == [2 if number in (again or []) else 1 for number in range(8)]
