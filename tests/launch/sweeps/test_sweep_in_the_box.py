"""`muster sweep` in a queue: Slurm's arrays and submitit's, in a box."""

import json
import signal
import subprocess
from typing import Any

import pytest

from muster.jobs.basics import exits
from support.box import BoxUser, ended
from support.live import argv, wait_until
from support.soak import only_some

pytestmark = [pytest.mark.command, pytest.mark.slow]

EXIT = "name: exit\ngrace_s: 1\n" + argv("import os; exit(int(os.environ['CODE']))")
SLEEP = "name: sleep\ngrace_s: 1\n" + argv("import time; print('ready', flush=True); time.sleep(1000)")
cluster = pytest.mark.cluster
patient = pytest.mark.timeout(180)
LISTED = "name: array\ngrace_s: 1\n" + argv("import os; print(os.environ['WHAT'])")

ON = [["--on", "slurm"], ["--on", "submitit"]]
BOTH = pytest.mark.parametrize("on", ON, ids=["slurm", "submitit"])
# Past the submission, which is tested for both, the jobs are followed and stopped in the same way.
SLURM = pytest.mark.parametrize("on", [ON[0], pytest.param(ON[1], marks=pytest.mark.soak)], ids=["slurm", "submitit"])


def rows(out: str) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = json.loads(out)["points"]
    return points


def sweep_of(user: BoxUser, text: str, *words: str) -> subprocess.Popen[str]:
    return user.start("sweep", text, "--json", *words)


def queue(user: BoxUser) -> list[str]:
    """The jobs of sweeps that wait or run, elements of arrays each for itself."""
    return [line for line in user.queued("--array", "--format=%i %j %T") if " sweep-" in line]


@cluster
@patient
@BOTH
def test_points_of_one_shape_are_one_array(user: BoxUser, on: list[str]) -> None:
    code, out, err = ended(sweep_of(user, LISTED, "--grid", "env.WHAT=a,b", "--grid", "nodes=1,2", "--limit", "1", *on))
    assert code == 0, err
    assert [line for line in err.splitlines() if line.endswith("2 of 4 points")] != []
    table = rows(out)
    assert {(row["state"], row["code"]) for row in table} == {("done", 0)}
    ids = [json.loads((user.runs / row["run_id"] / "slurm.json").read_text())["job_id"] for row in table]
    arrays = [each.partition("_")[0] for each in ids]
    assert arrays[0] == arrays[2] != arrays[1] == arrays[3]
    assert [each.partition("_")[2] for each in ids] == ["0", "0", "1", "1"]
    first = [(user.runs / row["run_id"] / "attempt-000" / "rank-00000.out").read_text() for row in table]
    assert first == ["a\n", "a\n", "b\n", "b\n"]


@cluster
@patient
@SLURM
def test_each_points_own_code_comes_back_from_an_array(user: BoxUser, on: list[str]) -> None:
    code, out, err = ended(sweep_of(user, EXIT, "--grid", "env.CODE='0','7','9'", *on))
    assert code == 7, err
    assert [row["code"] for row in rows(out)] == [0, 7, 9]


@cluster
@patient
@pytest.mark.parametrize(
    ("on", "how"),
    only_some([(on, how) for how in ("Ctrl-C", "stop") for on in ON], [(ON[0], "Ctrl-C"), (ON[0], "stop")]),
    ids=["slurm, Ctrl-C", "submitit, Ctrl-C", "slurm, stop", "submitit, stop"],
)
def test_the_end_of_a_sweep_stops_what_runs_and_cancels_what_waits(user: BoxUser, on: list[str], how: str) -> None:
    process = sweep_of(user, SLEEP, "--grid", "env.WHAT=a,b,c", "--limit", "1", *on)
    wait_until(lambda: list(user.runs.glob("*/attempt-000/rank-00000.out")), "the first point's rank")
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        code, out, err = user.call("stop", "sweep-sleep")
        assert (code, ": stopped 3 runs; no further run starts\n" in out) == (0, True), err
    code, out, err = ended(process)
    assert code == exits.STOPPED, err
    assert {row["state"] for row in rows(out)} == {"stopped"}
    wait_until(lambda: not queue(user), "an empty queue")


@cluster
@patient
@BOTH
def test_a_shape_that_is_refused_ends_its_points_only(user: BoxUser, on: list[str]) -> None:
    code, out, err = ended(
        sweep_of(user, LISTED, "--set", "env.WHAT=x", "--grid", "slurm.partition=nowhere,batch", *on)
    )
    assert code == exits.REFUSED, err
    assert [row["code"] for row in rows(out)] == [exits.REFUSED, 0]
    assert "muster: slurm.partition: sbatch says: " in err


@cluster
@patient
@pytest.mark.soak
@pytest.mark.parametrize("on", ON, ids=["slurm", "submitit"])
def test_a_sweep_that_was_stopped_in_the_queue_resumes_there(user: BoxUser, on: list[str]) -> None:
    gate = user.folder / "open"
    program = f"import os, time; print('begun', flush=True); time.sleep(1000 * (not os.path.exists('{gate}')))"
    text = "name: gate\ngrace_s: 1\n" + argv(program)
    process = sweep_of(user, text, "--grid", "env.WHAT=a,b", "--limit", "1", *on)
    wait_until(lambda: list(user.runs.glob("*/attempt-000/rank-00000.out")), "the first point's rank")
    code, _, err = user.call("stop", "sweep-gate")
    assert code == 0, err
    assert ended(process)[0] == exits.STOPPED
    gate.touch()
    code, out, err = user.call("resume", "sweep-gate")
    assert code == 0, out + err
    code, out, err = user.call("status", "sweep-gate", "--json")
    assert [row["state"] for row in rows(out)] == ["done", "done"], err
