"""Which tests `.ci/run --since REF` selects, and that the mark `command` is where it belongs."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from support.imports import REPOSITORY
from support.reach import STARTERS, STARTS, all_tests, closure, edges, files, found, marked, reach, runs_command, source
from support.worktrees import commit, git, repository

pytestmark = pytest.mark.slow

UNKNOWN = "-".join("unknown")  # not written out: a string that names a file would select this test
M = "muster"  # likewise: a string with a command would ask for the mark
TABLES = "pipe/schedules/tables.py"
# Nearly every change selects these: the first reads all Python files, and the second, this file, names some.
APART = {"tests/test_architecture.py", "tests/test_since.py"}


@pytest.fixture(scope="module")
def since() -> ModuleType:
    """The program that chooses."""
    spec = importlib.util.spec_from_file_location("since", REPOSITORY / ".ci/since.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def selected(since: ModuleType, *paths: str) -> set[str]:
    """Return the test files that changed files select, without two."""
    return set().union(*since.choose(set(paths)).values()) - APART


def test_the_mark_command_is_on_the_files_that_start_processes_of_musters_and_on_no_others() -> None:
    assert {test for test in all_tests() if marked(test)} == {test for test in all_tests() if runs_command(test)}


def test_every_support_file_that_starts_processes_is_known_for_it() -> None:
    others = [path for path in files() if path.startswith("tests/support/") and path != "tests/support/reach.py"]
    starting = [path for path in others if STARTS.search(source(path))]
    assert starting
    for path in starting:
        module = path.removeprefix("tests/").removesuffix(".py").replace("/", ".")
        assert STARTERS.search(f"{module}\n{source(path)}"), path


@pytest.mark.parametrize(
    ("text", "does"),
    [
        (f'run([sys.executable, "-m", "{M}", "run"])', True),
        (f'call("-m", "{M}.jobs.train")', True),
        (f'folder / "bin" / "{M}"', True),
        (f"sh -c 'python -m {M} run'", True),
        (f"{'module'}_argv(python)", True),
        (f'main(["{"run"}", "job.yaml"])', True),
        ('main(["status"])', False),
        ('run([sys.executable, "-m", "pip"])', False),
        (f'folder / "{M}"', False),
    ],
)
def test_what_starts_a_process_of_musters(text: str, does: bool) -> None:
    assert bool(STARTS.search(text)) == does


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("muster.pipe.schedules.tables.Table", TABLES),
        ("muster.ddp.BucketedDDP", "ddp/bucketed.py"),
        ("muster.ddp", "ddp/__init__.py"),
        ("muster.session", "jobs/session/opening.py"),
        ("support.worktrees.git", "tests/support/worktrees.py"),
        ("ranks.on_ranks", "benchmarks/ranks.py"),
        ("pathlib.Path", None),
    ],
)
def test_where_a_dotted_name_leads(name: str, path: str | None) -> None:
    assert found(name) == path


def test_a_leaf_selects_the_tests_that_import_it_and_those_of_the_command(since: ModuleType) -> None:
    chosen = since.choose({TABLES})
    imports = chosen["leads to a changed file"]
    assert {"tests/pipe/schedules/test_tables.py", "tests/pipe/test_pipeline_use.py"} <= imports
    assert imports.isdisjoint({"tests/cloudlab/test_rspec.py", "tests/jobs/test_hostnames.py"})
    assert "tests/jobs/test_hostnames.py" not in selected(since, TABLES)
    assert "tests/launch/test_run.py" in selected(since, TABLES)


def test_a_file_of_the_launcher_selects_all_tests_of_the_command(since: ModuleType) -> None:
    chosen = selected(since, "launch/transports/ssh.py")
    assert {test for test in all_tests() if marked(test)} <= chosen
    assert "tests/jobs/test_hostnames.py" not in chosen


def test_a_test_selects_itself(since: ModuleType) -> None:
    assert selected(since, "tests/jobs/test_hostnames.py") == {"tests/jobs/test_hostnames.py"}


def test_a_support_file_selects_those_that_use_it(since: ModuleType) -> None:
    chosen = selected(since, "tests/support/sshd.py")
    assert "tests/launch/test_ssh_transport.py" in chosen
    assert "tests/jobs/test_hostnames.py" not in chosen


def test_a_conftest_selects_its_folder_and_that_of_all_tests_everything(since: ModuleType) -> None:
    chosen = selected(since, "tests/launch/scheduler/conftest.py")
    assert {test for test in all_tests() if test.startswith("tests/launch/scheduler/")} <= chosen
    assert "tests/jobs/test_hostnames.py" not in chosen
    for path in ("tests/conftest.py", "tests/support/box.py", "tests/rank_server.py"):
        assert selected(since, path) == {*all_tests()} - APART


def test_a_file_leads_to_imports_packages_and_what_its_strings_name() -> None:
    assert {"jobs/world/world.py", "jobs/world/__init__.py"} <= edges("tests/ddp/test_buckets.py")
    assert "benchmarks/faults/bench.py" in reach("tests/benchmarks/test_faults.py")  # by conftest.py beside it, too
    assert "tests/rank_server.py" in edges("tests/conftest.py")  # a script
    assert "jobs/node/warm.py" in edges("tests/support/warm.py")  # a module that is started
    assert "launch/commands/why.py" in edges("tests/launch/test_why.py")  # a command
    assert "tests/conftest.py" not in closure(*all_tests())


def test_a_page_selects_the_tests_that_read_it(since: ModuleType) -> None:
    chosen = selected(since, "docs/course.md")
    assert {"tests/test_course.py", "tests/test_readme.py"} <= chosen
    assert "tests/jobs/test_hostnames.py" not in chosen
    assert "tests/test_examples.py" in selected(since, "jobs/examples/vgg11.yaml")


def test_what_is_gone_concerns_those_that_could_still_ask_for_it(since: ModuleType) -> None:
    assert "tests/pipe/schedules/test_tables.py" in selected(since, "pipe/schedules/gone.py")
    assert "tests/cloudlab/test_rspec.py" not in selected(since, "pipe/schedules/gone.py")
    assert selected(since, "tests/pipe/test_gone.py") == set()
    assert selected(since, f"tests/support/{UNKNOWN}.py") == {*all_tests()} - APART


@pytest.mark.parametrize("path", ["pyproject.toml", ".ci/run", "requirements/x.txt", "muster/x", UNKNOWN])
def test_what_nobody_knows_selects_everything(since: ModuleType, path: str) -> None:
    assert selected(since, path) == {*all_tests()} - APART


def test_all_kinds_of_changes_since_a_commit_count(since: ModuleType, tmp_path: Path) -> None:
    repository(tmp_path, ignore="ignored")
    for name in ("same", "committed", "staged", "changed", "removed", "from here"):
        (tmp_path / name).write_text(f"{name}\n" * 20)
    git(tmp_path, "add", "-A")
    ref = commit(tmp_path)
    assert since.changed_since(ref, tmp_path) == set()
    (tmp_path / "committed").write_text("now\n")
    git(tmp_path, "mv", "from here", "to there")
    git(tmp_path, "add", "-A")
    commit(tmp_path)
    (tmp_path / "staged").write_text("now\n")
    git(tmp_path, "add", "-A")
    (tmp_path / "changed").write_text("now\n")
    (tmp_path / "removed").unlink()
    (tmp_path / "untracked ü").touch()
    (tmp_path / "ignored").touch()
    expected = {"committed", "from here", "to there", "staged", "changed", "removed", "untracked ü"}
    assert since.changed_since(ref, tmp_path) == expected


def test_the_report_counts_by_reason(since: ModuleType) -> None:
    tests = all_tests()
    text = since.report({"a.py", "b.py"}, {"imports a changed module": {tests[0], tests[1]}, "names it": {tests[0]}})
    assert text.splitlines() == [
        "2 files have changed",
        "  a.py",
        "  b.py",
        f"2 of {len(tests)} test files are selected",
        "    2  imports a changed module",
        "    1  names it",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sinc", "main"], "cannot read '--sinc main'; usage: .ci/run [--since REF]"),
        (["--since"], "cannot read '--since'; usage: .ci/run [--since REF]"),
        (["--since", "a..b"], "--since a..b: no such commit; give a branch, a tag or a commit of this clone"),
    ],
)
def test_bad_words_are_refused_in_one_message(words: list[str], message: str) -> None:
    ended = subprocess.run([REPOSITORY / ".ci/run", *words], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (64, "", f".ci/run: {message}\n")
