"""The command line: its table, its errors, and what it costs to say hello."""

import importlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from muster.jobs.basics import errors
from muster.launch import cli

pytestmark = pytest.mark.command


def run_python(*arguments: str, **fields) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=30, **fields)


GROUPS = ["start:", "look:", "data and verification:", "measure:", "cluster:", "about:"]


def fake(monkeypatch: pytest.MonkeyPatch, run) -> None:
    """Let `muster why` be another command."""
    module = SimpleNamespace(configure=lambda parser: parser.add_argument("--x", type=int), run=run)
    monkeypatch.setitem(sys.modules, "muster.launch.commands.why", module)


def test_help_names_every_command_once_with_its_phrase(capsys) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, phrase in cli.PHRASES.items():
        assert len(re.findall(rf"^  {name} +{re.escape(phrase)}$", out, re.MULTILINE)) == 1
    assert [line for line in out.splitlines() if line.endswith(":")] == GROUPS


def test_help_of_a_command_and_help_before_it_are_the_same(capsys) -> None:
    assert cli.main(["logs", "--help"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["help", "logs"]) == 0
    assert capsys.readouterr().out == text
    assert text.startswith("usage: muster logs")


def test_without_a_command_help_is_shown_as_a_usage_error(capsys) -> None:
    assert cli.main([]) == 2
    assert "start:" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(cli.PHRASES))
def test_a_command_of_the_table_has_a_module_with_both_functions(name: str) -> None:
    module = importlib.import_module(f"muster.launch.commands.{name}")
    assert callable(module.configure)
    assert callable(module.run)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sttaus", "unknown command 'sttaus'; did you mean 'status'?"),
        ("--verison", "unknown option '--verison'; did you mean '--version'?"),
        ("verison", "unknown command 'verison'; did you mean '--version'?"),
        ("xyzzy", "unknown command 'xyzzy'; muster --help lists them"),
        ("--quiet", "unknown option '--quiet'; muster --help lists them"),
    ],
)
def test_an_unknown_command_names_the_nearest(argument: str, message: str, capsys) -> None:
    assert cli.main([argument]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"muster: {message}\n")


@pytest.mark.parametrize("option", ["--quiet", "--detach"])
def test_tee_is_refused_where_nothing_is_shown(option: str, capsys) -> None:
    assert cli.main(["run", "job.yaml", "--tee", option]) == 2
    assert f"--tee: has no effect with {option}; leave one out" in capsys.readouterr().err


def test_a_wrong_option_of_a_command_is_a_usage_error(capsys) -> None:
    assert cli.main(["list", "--nonsense"]) == 2
    assert "--nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.JobFileError("job.yaml: bad"), 65),
        (errors.RefusedError("no"), 78),
        (errors.StoppedError("user"), 130),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError(), None),  # a bug of ours is not hidden
    ],
)
def test_our_errors_are_one_line_and_their_exit_code(error: Exception, code: int | None, monkeypatch, capsys) -> None:
    def run(args) -> int:
        raise error

    fake(monkeypatch, run)
    if code is None:
        with pytest.raises(ZeroDivisionError):
            cli.main(["why"])
        return
    assert cli.main(["why"]) == code
    assert not str(error) or capsys.readouterr().err == f"muster: {error}\n"


def test_a_commands_own_code_is_returned(monkeypatch) -> None:
    fake(monkeypatch, lambda args: args.x)
    assert cli.main(["why", "--x", "93"]) == 93


def test_version_and_python_m_launch_work() -> None:
    done = run_python("-m", "muster", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("muster ")


def test_a_closed_pipe_is_answered_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [sys.executable, "-m", "muster", "--help"]
    done = subprocess.run(argv, env=env, stdout=writing, stderr=subprocess.PIPE, timeout=30, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_help_imports_nothing_of_ours_but_the_table_and_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); from muster.launch import cli; cli.main(['--help'])\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)), file=sys.stderr)"
    )
    done = run_python("-c", code, check=True)
    loaded = set(done.stderr.split())
    assert {name for name in loaded if name.startswith("muster")} == {"muster", "muster.launch", "muster.launch.cli"}
    assert not {"torch", "pydantic", "yaml", "rich", "dataclasses", "json", "importlib.metadata"} & loaded


@pytest.mark.parametrize("name", ["status", "logs", "why", "stop", "list"])
def test_looking_at_a_run_never_imports_torch_or_the_job_model(name: str, make_run) -> None:
    folder = make_run().submitted().attempt().ended()
    code = (
        f"import sys; from muster.launch import cli; cli.main([{name!r}, '--runs', {str(folder.root)!r}])\n"
        "print(' '.join({'torch', 'pydantic', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    assert run_python("-c", code, check=True).stderr.splitlines()[-1].strip() == ""
