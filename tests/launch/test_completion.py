"""`muster completion`: what is offered, and the scripts in real shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.runfolder.rundir import new_run
from muster.launch.cli import PHRASES, main
from muster.launch.commands.completion import completions

pytestmark = pytest.mark.command


def test_commands_options_choices_and_runs_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path, "hello")
    run.job.write_text("name: hello\n")
    run.events.write_text("")
    name = run.run_id
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path))
    assert completions(["pl"]) == ["plan", "plot"]
    assert "--detach" in completions(["run", "--d"])
    assert completions(["run", "--on", "s"]) == ["ssh", "slurm", "submitit"]
    assert completions(["bench", "co"]) == ["compare"]
    assert "--fail-on" in completions(["bench", "compare", "--f"])
    assert completions(["stop", "he"]) == [name]
    assert completions(["run", "--runs", ""]) == []  # the shell offers folders
    assert completions(["nothing", ""]) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_works_in_the_shell(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    program = tmp_path / "muster"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m muster "$@"\n')
    program.chmod(0o755)
    asked = {
        "bash": "source <(muster completion bash); COMP_WORDS=(muster run --det); COMP_CWORD=2; _muster; "
        'echo "${COMPREPLY[@]}"',
        "zsh": "compdef() {}; compadd() { echo $found; }; source <(muster completion zsh); words=(muster run --det); "
        "CURRENT=3; _muster",
        "fish": "muster completion fish | source; complete -C 'muster run --det'",
    }[shell]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([shell, "-c", asked], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.stdout.split() == ["--detach"], done.stderr


@pytest.mark.parametrize("name", PHRASES)
def test_every_help_has_an_example_and_fits_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"muster {name}" in said.partition("\n\n")[2].replace("usage: ", "")
    assert said.startswith(f"usage: muster {name} [OPTIONS]")


def test_a_usage_error_is_one_line_with_the_nearest_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.yaml", "--nodess", "3"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("muster plan: unrecognized arguments: --nodess 3; did you mean --nodes? (muster plan --help")
    assert said.count("\n") == 1
    assert main(["help", "hosts"]) == 0
    assert "--nodelist" in capsys.readouterr().out
