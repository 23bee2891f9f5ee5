"""Shells whose start-up files print: jobs start all the same, and a message about a silent agent quotes the text.

`ssh` is replaced by a stand-in that does what sshd and such a shell do.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host
from muster.jobs.spec.site import SshSettings
from muster.launch.cli import main
from muster.launch.submit.sync import sync
from support.live import LiveRun

pytestmark = [pytest.mark.command, pytest.mark.ranks]

SSH = """#!/bin/bash
for last; do :; done
{}
exec sh -c "$last"
"""
TITLE = r"printf '\033]0;n1\007'"
NOISES = {
    "title": TITLE,
    "stderr": "printf 'a colour' >&2",
    "large": "head -c 9000000 /dev/zero",
    "large stderr": "head -c 9000000 /dev/zero >&2",
    "while it runs": "for n in 1 2 3 4 5 6 7 8; do sleep 0.1; printf n$n; echo; printf n; done &",
}
Noisy = Callable[[str], None]


@pytest.fixture
def noisy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noisy:
    """Return a function that replaces ssh by a shell that first runs the given line."""

    def replace(line: str) -> None:
        path = tmp_path / "bin" / "ssh"
        path.parent.mkdir()
        path.write_text(SSH.format(line))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        (tmp_path / "hosts").write_text("n1 address=127.0.0.1\n")

    return replace


def run(folder: Path, transport: str, *lines: str) -> LiveRun:
    job = "\n".join(("command: [sh, -c, 'sleep 1; echo it runs']", *lines))
    return LiveRun(folder, job, "-H", str(folder / "hosts"), "--on", transport)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ssh", "pdsh"])
@pytest.mark.parametrize("noise", NOISES)
def test_a_job_runs_whatever_the_shell_prints(tmp_path: Path, noisy: Noisy, noise: str, transport: str) -> None:
    noisy(NOISES[noise])
    live = run(tmp_path, transport)
    assert live.end() == 0, live.err
    assert "it runs" in live.out


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ssh", "pdsh"])
@pytest.mark.parametrize("to", ["", ">&2"])
def test_a_time_out_quotes_what_the_node_has_printed(tmp_path: Path, noisy: Noisy, transport: str, to: str) -> None:
    """The start-up file waits for an answer. pdsh passes on whole lines."""
    noisy(f"printf 'Which \\033[1mproject? ' {to}; {'echo ' + to if transport == 'pdsh' else ':'}; exec sleep 1000")
    live = run(tmp_path, transport, "start_timeout_s: 2")
    assert live.end() == 124
    (verdict,) = live.events("ended")
    assert "(n1): the agent did not answer within 2 s (start_timeout_s); printed so far: " in verdict["message"]
    assert "Which \\x1b[1mproject?" in verdict["message"]


@pytest.mark.slow
def test_check_quotes_what_the_node_has_printed(
    tmp_path: Path, noisy: Noisy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("muster.launch.check.inspection.LIMIT_S", 2.0)
    noisy("printf 'Which project? '; exec sleep 1000")
    (tmp_path / "job.yaml").write_text("command: ['true']\n")
    words = ["check", str(tmp_path / "job.yaml")]
    assert main([*words, "-H", str(tmp_path / "hosts"), "--on", "ssh", "--runs", str(tmp_path / "runs")]) != 0
    said = capsys.readouterr()
    assert "no answer within 2 s" in said.out + said.err
    assert "printed so far: Which project?" in said.out + said.err


def test_code_is_brought_to_a_host_whose_shell_prints(tmp_path: Path, noisy: Noisy) -> None:
    noisy(TITLE)
    (outcome,) = sync(
        HostSet((Host("n1", ""),), str(tmp_path / "hosts")),
        SshSettings(),
        to=str(tmp_path / "code"),
        python=sys.executable,
    )
    assert (outcome.state, outcome.error) == ("brought", None)
    assert (tmp_path / "code" / "muster").is_dir()
