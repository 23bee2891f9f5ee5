"""Run folders made of the records that a supervisor writes, real processes that belong to a run, and an sshd."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import append_line
from muster.jobs.hosts import ranks
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes
from muster.launch.node.rank_parent_link import WARM
from muster.launch.transports import local
from support.agents import LOOPBACK, Started
from support.exact_jobs import TRAIN, tokens
from support.live import kill
from support.programs import Program, Programs
from support.resuming import hashes
from support.sshd import Sshd

T0 = 1735689600.0  # 2025-01-01 00:00:00 UTC
HERE = socket.gethostname()


class RunFolder:
    """A run folder that a test fills row by row; `node_of` deals ranks to nodes of two."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.run = RunDir(root / run_id)
        self.root = root
        self.run.path.mkdir(parents=True)
        self.run.events.touch()

    def event(self, event: str, after_s: float = 0.0, **fields: Any) -> "RunFolder":
        append_line(self.run.events, {"time": T0 + after_s, "event": event, **fields})
        return self

    def submitted(self, *, world_size: int = 4, nodes: int = 2, alive: bool = True, **fields: Any) -> "RunFolder":
        """Write the first row; the supervisor is this test's process, or one that has gone."""
        pid, ticks = os.getpid(), processes.start_ticks(os.getpid())
        row = {"run_id": self.run.run_id, "name": "vgg", "kind": "train", "nodes": nodes, "world_size": world_size}
        row |= {"transport": "local", "host": HERE, "pid": pid, "pid_start": ticks if alive else ticks - 1}
        return self.event("submitted", **{**row, "grace_s": 5.0, **fields})

    def attempt(self, attempt: int = 0, *, world_size: int = 4, after_s: float = 0.5) -> "RunFolder":
        self.run.attempt(attempt).path.mkdir()
        fields = {"world_size": world_size, "master_addr": "127.0.0.1", "master_port": 29500}
        return self.event("attempt", after_s, attempt=attempt, **fields)

    def started(self, attempt: int = 0, *, world_size: int = 4, per_node: int = 2, host: str = HERE) -> "RunFolder":
        for node in range(world_size // per_node):
            of_node = [[rank, 1000 + rank] for rank in range(node * per_node, (node + 1) * per_node)]
            self.event("started", 1.0, attempt=attempt, node=node, host=host, ranks=of_node)
        return self

    def exited(self, rank: int, after_s: float, *, code: int | None = None, cause: str, **fields: Any) -> "RunFolder":
        row = {"attempt": 0, "rank": rank, "node": rank // 2, "host": f"node{rank // 2}", "code": code, "signal": None}
        row |= {"ended": T0 + after_s, "cause": cause, "message": "", "last_lines": []}
        return self.event("exited", after_s, **{**row, **fields})

    def verdict(self, after_s: float = 12.0, **fields: Any) -> "RunFolder":
        row = {"attempt": 0, "started": T0, "ended": T0 + after_s, "first": None, "victims": [], "next_step": ""}
        append_line(self.run.attempts, {**row, **fields})
        return self

    def ended(self, after_s: float = 12.0, *, code: int = 0, name: str = "done", message: str = "") -> "RunFolder":
        return self.event("ended", after_s, attempt=0, code=code, message=message, **{"class": name})

    def write(self, rank: int, text: str | bytes, *, stream: str = "out", attempt: int = 0) -> "RunFolder":
        folder = self.run.attempt(attempt)
        path = folder.out(rank) if stream == "out" else folder.err(rank)
        with path.open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        return self

    def step(self, step: int, **fields: Any) -> "RunFolder":
        row = {"step": step, "attempt": 0, "epoch": 0, "rank": 0, "loss": 2.0, "rate": 812.0, "unit": "samples/s"}
        append_line(self.run.metrics, {**row, **fields})
        return self


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder with nothing in it."""
    return RunDir(tmp_path)


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunFolder]:
    """Return a function that makes a run folder with a fixed id, where commands without --runs find it."""
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path / "runs"))
    return lambda run_id="vgg-20250101T000000Z-abc123": RunFolder(tmp_path / "runs", run_id)


# Who forks another is gone before that one says anything: until then it would be found as well.
FORK = """
between = os.getpid()
if os.fork(): os._exit(0)
while os.getppid() == between: time.sleep(0.001)
"""
BODIES = {
    "plain": "",
    "ignores TERM": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "called setsid": "import os; os.setsid()",
    "forked twice": f"import os, time\n{FORK}os.setsid()\n{FORK}",
}


class Starter:
    """Starts processes that say READY and then sleep; all are ended with the test."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[str]] = []
        self.pids: list[int] = []

    def __call__(self, run_id: str | None, body: str = "plain") -> int:
        """Start one with the run id in its environment; return the pid of the process that stays."""
        code = BODIES[body] + "\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(50)"
        env = {key: value for key, value in os.environ.items() if key != ranks.RUN_ID}
        if run_id is not None:
            env[ranks.RUN_ID] = run_id
        child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        self.children.append(child)
        self.pids.append(int(child.stdout.readline()))
        return self.pids[-1]

    def stop(self) -> None:
        """Kill and reap everything that was started."""
        kill(*self.pids)
        for child in self.children:
            child.kill()
            child.wait()
            child.stdout.close()


@pytest.fixture
def start_process() -> Iterator[Starter]:
    """Return a function that starts a process of a run."""
    starter = Starter()
    yield starter
    starter.stop()


@pytest.fixture(scope="module")
def forked_ranks(programs: Programs) -> Iterator[None]:
    """Let runs that a test starts in its own process have ranks that have imported torch already.

    Not for tests of processes or their imports: those of the run do not show its variables.
    """

    def start(sockets: list[socket.socket], *, preload: str, env: dict[str, str], **_: object) -> Program:
        words = ("--fds", ",".join(str(4 + number) for number in range(len(sockets))), "--preload", preload)
        return programs.start("-m", WARM, *words, env=env, descriptors=[each.fileno() for each in sockets])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "start_warm", start)
        yield


@pytest.fixture
def in_process(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs `muster ...` in this process: (code, out, err)."""
    from muster.launch.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def muster(make_run: Callable[..., RunFolder], in_process: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs `muster ...` on the folder of `make_run`: (code, out, err)."""
    return lambda *arguments: in_process(*arguments, "--runs", str(tmp_path / "runs"))


@pytest.fixture
def muster_json(muster: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `muster ... --json` and reads what it printed."""

    def run(*arguments: str) -> Any:
        code, out, _ = muster(*arguments, "--json")
        assert code == 0
        return json.loads(out)

    return run


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A real sshd on loopback, for all tests."""
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


@pytest.fixture
def start_agent() -> Iterator[Callable[..., Started]]:
    """Return a function that starts an agent: its options, and variables of its environment."""
    made: list[Started] = []

    def begin(*options: str, **variables: str) -> Started:
        made.append(Started(*options, **variables))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A port that listens; the supervisor's."""
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server


@pytest.fixture(scope="session")
def uninterrupted(
    programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Return the hashes of the last checkpoint of a training on one rank, by the keys that differ from `TRAIN`.

    All exact modes have the same ones.
    """
    found: dict[str, dict[str, str]] = {}

    def of(keys: dict[str, Any]) -> dict[str, str]:
        train = {**TRAIN, "data": tokens(pause_s=0.0), **keys}
        given = {key: each for key, each in train.items() if each is not None}
        text = json.dumps({"train": given, "checkpoint": {"every_steps": 1000}})
        if text not in found:
            folder = tmp_path_factory.mktemp("whole")
            (folder / "job.yaml").write_text(text)
            ended = programs.run("-m", "muster.jobs.train", folder / "job.yaml", "--runs", folder / "runs")
            assert ended.returncode == 0, ended.stderr
            found[text] = hashes(next((folder / "runs").glob("[!.]*")))
        return found[text]

    return of
