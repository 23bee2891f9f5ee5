"""What `.ci/run` does with tests: two rows of them beside each other; those marked unsteady may fail once, loudly."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = (Path(__file__).resolve().parents[1] / ".ci/run").read_text(encoding="utf-8")
FUNCTIONS = SCRIPT[SCRIPT.index("stage() {") : SCRIPT.index('stage "system packages"')]
ROWS = SCRIPT[SCRIPT.index("# Two rows of tests") :]
COUNTER = Path(__file__).resolve().parents[1] / ".ci/cpu_seconds.py"
HEADING = "!! FAILED THE FIRST TIME: "
TESTS = """
import pathlib
import pytest

def play(number):
    runs = pathlib.Path(f"runs-{number}")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) > pathlib.Path("failures").read_text().split()[number].count("F")

@pytest.mark.unsteady("chance")
@pytest.mark.parametrize("number", range(7))
def test_of_chance(number):
    play(number)

def test_without_chance():
    play(7)
"""


@pytest.mark.parametrize(
    ("failures", "code", "again"),
    [
        (". . . . . . . .", 0, None),
        (". F . . . F . .", 0, [1, 5]),
        (". F . . . FF . .", 1, [1, 5]),
        (". F . . . . . F", 1, None),
        (". . . . . . . F", 1, None),
    ],
    ids=["none", "two by chance", "one of two again", "one that is steady, too", "a steady one"],
)
def test_only_tests_that_are_marked_unsteady_are_run_once_more_and_named(
    tmp_path: Path, failures: str, code: int, again: list[int] | None
) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/cpu_seconds.py").symlink_to(COUNTER)
    for name, command in (("python", ""), ("pytest", " -m pytest")):
        (tmp_path / f".venv/bin/{name}").write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
        (tmp_path / f".venv/bin/{name}").chmod(0o755)
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "failures").write_text(failures)
    script = "\n".join(
        [
            "set -euo pipefail",
            FUNCTIONS,
            "stage core",
            "tests 'true && .venv/bin/pytest test_them.py' .pytest_cache test_them.py",
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


@pytest.mark.parametrize("fails", ["nothing", "mypy", " tests/launch", "core", "--ignore"])
def test_every_test_is_in_one_of_the_rows_and_each_can_fail_the_build(tmp_path: Path, fails: str) -> None:
    """mypy and pytest are replaced by programs that record their arguments."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/cpu_seconds.py").symlink_to(COUNTER)
    called = 'echo "${0##*/} $*" >>calls; case "$0 $*" in *"$FAILS"*) exit 2; esac'
    for name, text in (("setup.sh", "exit 0"), (".venv/bin/mypy", called), (".venv/bin/pytest", called)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "README.md").write_text("./setup.sh --dev && .venv/bin/pytest -m core\n")
    ended = subprocess.run(
        ["bash", "-c", "\n".join(["set -euo pipefail", "since=", FUNCTIONS, ROWS])],
        cwd=tmp_path,
        env={**os.environ, "FAILS": fails},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0 if fails == "nothing" else 2, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    slow = "-m slow and not gpu and not soak"
    calls = [re.sub(r" --durations=\d+| ?-o cache_dir=\S+", "", call).rstrip() for call in calls]
    (folder,) = (call.split()[-1] for call in calls if slow in call and "--ignore" not in call)
    assert (Path(__file__).parents[1] / folder).is_dir()
    tests = ["-m core", f"{slow} --ignore={folder}", f"{slow} {folder}"]
    assert "CPU seconds: " in ended.stdout
    assert "  mypy\n" in ended.stdout
    assert sorted(calls) == sorted(["mypy", *(f"pytest {words}" for words in tests)])


@pytest.mark.parametrize(
    ("fails", "chosen", "code"),
    [
        ("nothing", "tests/test_a.py tests/b/test_b.py", 0),
        ("nothing", "", 0),
        ("mypy", "tests/test_a.py", 2),
        ("core", "tests/test_a.py", 2),
        ("since.py", "", 2),
        ("-m slow", "tests/test_a.py", 2),
        ("none of these marks", "tests/test_a.py", 0),
    ],
)
def test_since_a_commit_the_core_and_the_chosen_tests_run_and_each_can_fail_the_build(
    tmp_path: Path, fails: str, chosen: str, code: int
) -> None:
    """mypy, pytest and the program that chooses are replaced by programs that record their arguments."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/cpu_seconds.py").symlink_to(COUNTER)
    called = 'echo "${0##*/} $*" >>calls; case "$0 $*" in *"$FAILS"*) exit 2; esac'
    none = '; case "$FAILS $*" in "none of these marks"*slow*) exit 5; esac'
    choosing = f'{called}; for each in $CHOSEN; do echo "$each"; done'
    for name, text in (
        ("setup.sh", "exit 0"),
        (".venv/bin/mypy", called),
        (".venv/bin/pytest", called + none),
        (".venv/bin/python", choosing),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "README.md").write_text("./setup.sh --dev && .venv/bin/pytest -m core\n")
    ended = subprocess.run(
        ["bash", "-c", "\n".join(["set -euo pipefail", "since=main", FUNCTIONS, ROWS])],
        cwd=tmp_path,
        env={**os.environ, "FAILS": fails, "CHOSEN": chosen},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    calls = [re.sub(r" --durations=\d+| ?-o cache_dir=\S+", "", call) for call in calls]
    selected = [f"pytest -m slow and not gpu and not soak {chosen}"] * bool(chosen)
    assert calls == ["mypy ", "pytest -m core", "python .ci/since.py main", *selected]
    assert "CPU seconds: " in ended.stdout
