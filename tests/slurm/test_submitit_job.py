"""What submitit runs: as data, in its waits, and at its end."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from muster.jobs.basics import exits
from muster.jobs.runfolder.rundir import RunDir
from muster.slurm.submitit_job import SubmititTask, await_rendezvous, publish, start_key
from muster.slurm.submitit_submit import default_minutes, minutes_of
from support.live import wait_until

SINFO = "batch*|n/a|infinite\nshort|30:00|2:00:00\nlong|n/a|7-00:00:00\nodd|n/a|1:30\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    return made


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


@pytest.fixture(autouse=True)
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a task of submitit's job 77: the one whose rank the test is given, or task 0."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_PROCID", str(getattr(request, "param", 0)))
    monkeypatch.setenv("SLURM_JOB_ID", "77")


def test_a_task_pickles_to_little_more_than_its_words() -> None:
    task = SubmititTask(["supervise"], ["agent"], "/runs/x")
    assert pickle.loads(pickle.dumps(task)) == task
    assert len(pickle.dumps(task)) < 300


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", exits.SIGNAL_BASE + 9),
        # The signal before the end does not reach the child.
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR2)", 0),
    ],
)
def test_task_0_supervises_and_its_code_is_the_result(run: RunDir, code: str, result: int) -> None:
    assert SubmititTask(python(code), ["never"], str(run.path))() == result
    assert json.loads(run.rendezvous.read_text())["over"] == result


@pytest.mark.parametrize("rank", [2], indirect=True)
def test_another_task_is_an_agent_of_its_node_with_what_task_0_told(run: RunDir, tmp_path: Path) -> None:
    said = tmp_path / "said"
    publish(run, {"arguments": ["--connect", "a b:1"], "environment": {"SECRET": "s p"}})
    code = f"import os, sys; open({str(said)!r}, 'w').write(repr((sys.argv[1:], os.environ['SECRET'])))"
    assert SubmititTask(["never"], python(code), str(run.path))() == 0
    assert said.read_text() == repr((["--node", "2", "--connect", "a b:1"], "s p"))


@pytest.mark.parametrize("rank", [1], indirect=True)
def test_a_task_that_still_waits_leaves_when_the_run_is_over(run: RunDir) -> None:
    publish(run, {"over": 69})
    assert SubmititTask(["never"], ["never"], str(run.path))() == 69


def test_only_the_user_may_read_the_rendezvous(run: RunDir) -> None:
    publish(run, {"arguments": []})
    assert run.rendezvous.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in run.path.iterdir()] == [run.rendezvous.name]


def test_what_an_earlier_start_has_left_is_waited_out(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    publish(run, {"arguments": ["old"]})
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(TimeoutError, match="task 0 has not published"):
        await_rendezvous(run, 0.3)
    later = threading.Timer(0.2, publish, (run, {"arguments": ["new"]}))
    later.start()
    assert await_rendezvous(run, 20.0)["arguments"] == ["new"]
    later.join()


def test_a_start_is_named_by_its_job_and_how_often_it_was_queued() -> None:
    assert start_key({"SLURM_JOB_ID": "5"}) == "5.0"
    assert start_key({"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "2"}) == "5.2"


DRAINED = """
import json, os, sys, time
print("up", flush=True)
deadline = time.monotonic() + 20
while not os.path.exists(sys.argv[1]) and time.monotonic() < deadline:
    time.sleep(0.01)
sys.exit(json.load(open(sys.argv[1]))["code"])
"""


def checkpointed(task: SubmititTask, meanwhile: str = "") -> object:
    """Call `checkpoint` as submitit does: from a signal's handler, while the task waits for its child."""
    found: list[object] = []

    def handler(number: int, frame: object) -> None:
        found.append(task.checkpoint())

    before = signal.signal(signal.SIGUSR2, handler)
    again = threading.Thread(target=lambda: (wait_until(lambda: task._pidfd >= 0, "the child"), send()))

    def send() -> None:
        if meanwhile:
            RunDir(Path(task.run)).stop.write_text(meanwhile)
        os.kill(os.getpid(), signal.SIGUSR2)

    again.start()
    try:
        task()
    finally:
        again.join()
        signal.signal(signal.SIGUSR2, before)
    return found[0]


def test_a_checkpoint_ends_the_attempt_and_is_the_same_task_again(run: RunDir) -> None:
    task = SubmititTask([*python(DRAINED), str(run.stop)], ["agent"], str(run.path))
    again = checkpointed(task)
    assert again.function == task  # type: ignore[attr-defined]
    assert not run.stop.exists()  # or the next attempt would end too


def test_what_the_user_stops_or_ends_by_itself_is_not_queued_again(run: RunDir) -> None:
    assert SubmititTask([], [], str(run.path)).checkpoint() is None
    ends = DRAINED.partition("sys.exit(")[0] + "sys.exit(0)"
    assert checkpointed(SubmititTask([*python(ends), str(run.stop)], ["agent"], str(run.path))) is None
    task = SubmititTask([*python(DRAINED), str(run.stop)], ["agent"], str(run.path))
    assert checkpointed(task, json.dumps({"code": exits.STOPPED})) is None
    assert run.stop.exists()


def test_the_supervisor_is_told_to_end_when_its_task_is_killed(run: RunDir, tmp_path: Path) -> None:
    said = tmp_path / "said"
    child = (
        "import signal, sys, time\n"
        f"def end(*_): open({str(said)!r}, 'a').write('term'); sys.exit()\n"
        f"signal.signal(signal.SIGTERM, end); open({str(said)!r}, 'w').write('up '); time.sleep(50)"
    )
    task = (
        f"from muster.slurm.submitit_job import SubmititTask; SubmititTask({python(child)!r}, [], {str(run.path)!r})()"
    )
    with subprocess.Popen([sys.executable, "-c", task]) as process:
        wait_until(lambda: said.exists() and said.read_text() == "up ", "the child")
        process.kill()
    wait_until(lambda: said.read_text() == "up term", "the child's end")


@pytest.mark.parametrize(
    ("partition", "minutes"),
    [(None, 525_600), ("short", 30), ("long,short", 30), ("odd", 2), ("nowhere", 525_600)],
)
def test_a_job_without_a_limit_gets_that_of_its_partition(partition: str | None, minutes: int) -> None:
    assert default_minutes(SINFO, partition) == minutes
    assert default_minutes("", None) == 525_600


def test_limits_are_read_as_sinfo_prints_them() -> None:
    shown = {"infinite": 0, "n/a": 0, "": 0, "30:00": 30, "1:00:00": 60, "7-00:00:00": 10_080, "0:30": 1, "x-1:00": 0}
    assert {text: minutes_of(text) for text in shown} == shown


def test_a_machine_without_submitit_says_so(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['submitit'] = None; sys.argv = ['x', 'folder']\n"
    for module in ("muster.slurm.submitit_job", "muster.slurm.submitit_submit"):
        code = f"{hidden}from {module} import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code], input="{}", capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == exits.REFUSED
        assert done.stderr.count("\n") == 1
        assert "has no submitit" in done.stderr
        assert "setup.sh" in done.stderr
