"""`muster watch` in a real terminal: a run whose rank is killed and comes back, and whose rank then is suspended."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.live import TRAINING, LiveRun, wait_until
from support.terminals import environment

pytestmark = [pytest.mark.command, pytest.mark.slow, pytest.mark.ranks]

JOB = f"{TRAINING}restart: {{max: 2}}\ncheckpoint: {{every_steps: 10}}\n"


class Tmux:
    """A terminal of 100 columns and 24 lines with a shell in it, on a server of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "tmux")
        shell = ["env", "PS1=$ ", "bash", "--norc", "--noprofile"]
        size = ["-x", "100", "-y", "24"]
        self("-f", "/dev/null", "new-session", "-d", *size, *shell, env=environment())  # COLUMNS is wrong in it

    def __call__(self, *words: str, env: dict[str, str] | None = None) -> str:
        argv = ["tmux", "-S", self.socket, *words]
        return subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=20).stdout

    def type(self, *keys: str) -> None:
        self("send-keys", *keys)

    def shows(self) -> str:
        return self("capture-pane", "-p")

    def wait_for(self, pattern: str) -> str:
        """Wait until what is shown holds a pattern; return what is shown."""
        found: list[str] = []

        def matches() -> bool:
            found[:] = [self.shows()]
            return re.search(pattern, found[0]) is not None

        try:
            wait_until(matches, f"{pattern!r} on the terminal", 45.0)
        except AssertionError as error:
            raise AssertionError(f"{error}, which shows\n{found[0]}") from None
        return found[0]


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux (a Debian package; .ci/run installs it)")
    terminal = Tmux(tmp_path)
    yield terminal
    terminal("kill-server")


def test_a_killed_and_a_suspended_rank_are_seen_and_the_terminal_is_restored(tmp_path: Path, tmux: Tmux) -> None:
    live = LiveRun(tmp_path, JOB)
    run = live.run
    before = tmp_path / "before"
    after = tmp_path / "after"
    tmux.type(f"stty -g >{before}", "Enter")
    watch = shlex.join([sys.executable, "-m", "muster", "watch", "--runs", str(live.root)])
    tmux.type(watch, "Enter")
    text = tmux.wait_for(r"step +\d+ of \d+, [\d.]+ steps/s, .* left")
    assert re.search(r"rank +node +host +step +phase +seen +step time +comm +mark", text)
    tmux.wait_for(r"saved +step \d+; next at step \d+ in .*; a failure now loses \d+ steps?, ")

    os.kill(live.pid_of(1), signal.SIGKILL)
    tmux.wait_for(r"attempt +1, after 1 restart")
    assert "because  rank 1 on node 1" in tmux.wait_for(r"was killed by SIGKILL")

    tmux("resize-window", "-x", "60", "-y", "20")
    tmux.wait_for(r"\Arun +job-\S+ +running\n(?s:.*)\n1-2 of 2 ranks  q quit  j k scroll  r ranks  n nodes\n")
    live.wait_for("started", 4)
    rank = live.events("started")[-1]["ranks"][0]
    tmux.wait_for(r"attempt +1(?s:.*)step +\d+ of \d+, [\d.]+ steps/s")
    os.kill(rank[1], signal.SIGSTOP)
    assert re.search(rf"(?m)^ *{rank[0]} .*suspended$", tmux.wait_for("(?m) suspended$"))
    os.kill(rank[1], signal.SIGCONT)

    tmux.type("n")
    tmux.wait_for(r"1-2 of 2 nodes")
    tmux.type("q")
    tmux.wait_for(r"\$\s*\Z")
    tmux.type(f"stty -g >{after}", "Enter")
    wait_until(lambda: after.is_file() and after.read_text().endswith("\n"), "the settings of the terminal")
    assert after.read_text() == before.read_text()
    assert tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]

    # The end of a run ends the watching too, and is left on the terminal.
    tmux.type(f"{watch}; echo code $?", "Enter")
    tmux.wait_for(r"1-2 of 2 ranks")
    live.interrupt()
    live.interrupt()
    text = tmux.wait_for(r"code 0")
    assert re.search(r"outcome +stopped", text), text
    assert run.path.name in text
    assert not run.progress.exists()
    live.end()
