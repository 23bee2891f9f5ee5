"""`muster resume`: what the next attempt is made of, what is refused, and what is ended and written first."""

import argparse
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import append_line, read_lines, write_json
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.kept import DATA, KEPT, kept_settings
from muster.jobs.spec.train import TrainSettings
from muster.launch.commands import run as run_command
from muster.launch.common import processes
from muster.launch.common.options import given
from muster.launch.plan.submission import Submission
from muster.launch.records import lease
from muster.launch.submit import resume, start
from muster.launch.submit.prepare import prepare
from muster.launch.submit.request import Request
from muster.launch.supervision.resumption import with_checkpoint
from support.checkpoints import Saved

pytestmark = pytest.mark.command

TRAIN = {"model": "gpt-nano", "data": "python-source", "batch_size": 8, "epochs": 2}
JOB = {"name": "vgg", "nodes": 2, "train": TRAIN, "checkpoint": {"every_steps": 10}}
COMMAND = {"name": "vgg", "command": ["true"]}
ID = "vgg-20250101T000000Z-abc123"


class Folder:
    """A run folder as a supervisor leaves it, its submission made by the real way of `muster run`."""

    def __init__(self, root: Path, job: dict[str, Any], *words: str) -> None:
        root.mkdir()
        file = root.parent / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        parser = argparse.ArgumentParser()
        run_command.configure(parser)
        prepared = prepare(given(parser.parse_args([str(file), "--runs", str(root), *words]), Request))
        self.saved = Saved(root / ID)
        self.run: RunDir = self.saved.run
        self.run.job.write_text(prepared.loaded.text)
        self.run.site.write_text(prepared.site_text)
        replace(prepared.submission, context=replace(prepared.context, run=self.run)).write()
        settings = prepared.context.job.settings
        if isinstance(settings, TrainSettings):
            kept = kept_settings(settings, samples=1000, virtual_ranks=settings.virtual_world_size(1))
            self.saved.meta = {KEPT: {**kept, DATA: {"name": "python-source", "samples": 1000, "sha256": "0" * 64}}}
        self.kind, self.transport = prepared.context.job.kind, prepared.submission.route.transport

    def event(self, event: str, **fields: Any) -> "Folder":
        append_line(self.run.events, {"time": time.time(), "event": event, "attempt": 0, **fields})
        return self

    def submitted(self, *, alive: bool = False, **fields: Any) -> "Folder":
        ticks = processes.start_ticks(os.getpid())
        who = {"host": socket.gethostname(), "pid": os.getpid(), "pid_start": ticks if alive else ticks - 1}
        self.event("submitted", **{"kind": self.kind, "transport": self.transport, **who, **fields})
        return self.event("attempt", world_size=2, hosts=["n", "n"])

    def ended(self, name: str = "stopped", code: int = 130) -> "Folder":
        return self.submitted().event("ended", code=code, **{"class": name}, message="m")

    def submission(self) -> Submission:
        return Submission.read(self.run)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Folder]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "MUSTER_SITE", "MUSTER_RUNS"):
        monkeypatch.delenv(name, raising=False)
    return lambda job=None, *words: Folder(tmp_path / "runs", job or JOB, *words)


@pytest.fixture
def stopped(make: Callable[..., Folder]) -> Folder:
    """A training that was stopped after its save of step 10."""
    folder = make().ended()
    folder.saved.save(10)
    return folder


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """What would have been supervised from this process."""
    found: list[Submission] = []
    monkeypatch.setattr(
        start, "supervise", lambda submission, console: found.append(submission) or SimpleNamespace(code=42)
    )
    return found


@pytest.fixture
def muster(tmp_path: Path, in_process: Callable[..., Any]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs `muster resume ...`: (code, error output)."""
    return lambda *words: in_process("resume", *words, "--runs", str(tmp_path / "runs"))[::2]


def last_row(folder: Folder, event: str) -> dict[str, Any]:
    return [row for row in read_lines(folder.run.events) if row["event"] == event][-1]


# What it is made of -------------------------------------------------------------------------------------------------


def test_the_next_attempt_is_what_was_submitted(stopped, muster, supervised) -> None:
    stopped.run.stop.write_text("{}")
    before, text = stopped.submission(), stopped.run.job.read_text()
    assert muster() == (42, "")
    assert supervised == [before]
    assert (supervised[0].context.attempt, supervised[0].context.run) == (1, stopped.run)
    assert (stopped.submission(), stopped.run.job.read_text()) == (before, text)
    assert not stopped.run.stop.exists()
    row = last_row(stopped, "resumed")
    assert (row["attempt"], row["changes"], "job" in row) == (1, [], False)


def test_what_is_to_be_different_is_written_back_and_the_job_before_is_kept(stopped, muster, supervised) -> None:
    earlier = stopped.run.job.read_text()
    assert muster("--set", "train.log_every=7", "-N", "1", "-x", "A=b")[0] == 42
    job = supervised[0].context.job
    assert (job.settings.log_every, job.nodes, job.env) == (7, 1, {"A": "b"})
    assert supervised[0].context.placement.world_size == 1
    assert stopped.submission() == supervised[0]
    assert yaml.safe_load(stopped.run.job.read_text())["train"]["log_every"] == 7
    row = last_row(stopped, "resumed")
    assert (row["changes"], row["job"]) == (["train.log_every=7"], "job-before-001.yaml")
    kept = stopped.run.path / row["job"]
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == (earlier, 0o600)
    assert supervised[0].context.workdir == str(Path.cwd())


def test_in_another_mode_it_names_the_settings_that_it_no_longer_uses_and_goes_on(make, muster, supervised) -> None:
    train = {**TRAIN, "mode": "zero2", "accumulate": "sharded", "bucket_size_mb": 1.0}
    folder = make({**JOB, "train": train}).ended()
    folder.saved.save(10)
    code, err = muster("--set", "train.mode=bucketed")
    assert (code, supervised[0].context.job.settings.mode) == (42, "bucketed")
    assert err == (
        "muster: train.accumulate: has no effect in mode bucketed; it is for modes zero1, zero2, zero3 and "
        "fsdp; the run continues without it\n"
    )


def test_fewer_steps_than_were_saved_are_refused(make, muster, supervised) -> None:
    folder = make({**JOB, "train": {key: TRAIN[key] for key in TRAIN if key != "epochs"} | {"steps": 600}}).ended()
    folder.saved.save(100)
    folder.saved.save(239)
    code, err = muster("--set", "train.steps=40")
    assert (code, supervised) == (78, [])
    assert "train.steps: 40 is less than the 239 steps of step-00000239.a000; give more steps, or go back" in err
    assert muster("--set", "train.steps=140", "--from", "100")[0] == 42


@pytest.mark.parametrize("words", [("--jump", "gate"), ("--iface", "eth1"), ("-e", "n1")])
def test_options_of_hosts_are_refused_for_a_run_without_hosts(make, muster, supervised, words) -> None:
    make().ended().saved.save(10)
    code, err = muster(*words)
    assert (code, supervised) == (2, [])
    assert "has no effect with --on local; it is for ssh, pdsh" in err


@pytest.mark.parametrize(("wanted", "told"), [("10", 10), ("step-00000010.a000", "step-00000010.a000")])
def test_an_older_checkpoint_is_for_the_next_attempt_alone(stopped, muster, supervised, wanted: str, told) -> None:
    stopped.saved.save(20)
    assert muster("--from", wanted)[0] == 42
    assert supervised[0].context.options == {"from": told, "from_attempt": 1}
    stopped.event("ended", code=130, **{"class": "stopped"})
    assert muster()[0] == 42
    assert supervised[1].context.options == {}


def test_hosts_are_those_of_before_but_for_what_is_named(make, muster, supervised) -> None:
    folder = make(JOB, "-w", "n[1-3]", "--iface", "eth7").ended()
    folder.saved.save(10)
    assert muster("-e", "n1")[0] == 42
    assert [node.host for node in supervised[0].context.placement.nodes] == ["n2", "n3"]
    assert (supervised[0].route.transport, supervised[0].route.iface) == ("ssh", "eth7")
    assert muster("--on", "pdsh")[0] == 42
    assert [node.host for node in supervised[1].context.placement.nodes] == ["n2", "n3"]
    assert supervised[1].route.transport == "pdsh"
    assert muster("-w", "m[1-2]")[0] == 42
    assert [node.host for node in supervised[2].context.placement.nodes] == ["m1", "m2"]


def test_a_program_of_the_users_starts_again(make, muster, supervised) -> None:
    make(COMMAND).ended("failed", 3)
    assert muster()[0] == 42
    assert supervised[0].context.attempt == 1
    assert muster("--from", "3")[0] == 66  # it has saved nothing here


def test_a_program_that_has_saved_goes_on_from_what_it_names(make, muster, supervised) -> None:
    folder = make(COMMAND).ended("failed", 3)
    folder.saved.save(10)
    folder.saved.save(20)
    assert muster("--from", "10")[0] == 42
    assert supervised[0].context.options == {"from": 10, "from_attempt": 1}
    assert muster("--from", "11")[0] == 66


def test_a_run_that_is_done_goes_on_when_it_is_given_more(make, muster, supervised) -> None:
    folder = make().ended("done", 0)
    folder.saved.save(10)
    code, err = muster()
    assert (code, supervised) == (78, [])
    assert "is done (2 epochs); to train longer, raise the limit: muster resume" in err
    assert "--set train.epochs=4" in err
    assert muster("--set", "train.epochs=2")[0] == 78
    assert muster("--set", "train.epochs=3")[0] == 42


def test_a_run_can_be_left_to_itself(stopped, muster, monkeypatch) -> None:
    left: list[Any] = []
    monkeypatch.setattr(start, "detach", lambda *what: left.append(what))
    assert muster("--detach")[0] == 0
    assert left == [(stopped.run, stopped.submission().context.python, None)]


def test_a_job_of_slurms_is_submitted_again(make, muster, monkeypatch) -> None:
    folder = make(JOB, "--on", "slurm").ended()
    folder.saved.save(10)
    write_json(folder.run.slurm, {"job_id": "7", "name": ID})
    submitted: list[Submission] = []
    monkeypatch.setattr(start, "put_into_queue", submitted.append)
    assert muster("--detach", "-e", "n7")[0] == 0
    assert submitted[0].context.job.slurm.exclude == "n7"
    assert not folder.run.slurm.exists()  # it is another job's


def test_a_run_that_ended_before_its_first_save_starts_from_step_0_and_says_so(make, muster, supervised) -> None:
    folder = make().ended()
    folder.saved.write(10)  # one of two ranks had come that far, and nothing was committed
    folder.saved.run.checkpoint(10, 0).ok(1).unlink()
    code, err = muster()
    assert (code, err) == (42, f"muster: {ID}: nothing was saved before it ended: it starts again from step 0\n")
    given = with_checkpoint(supervised[0].context, print)
    assert given.options == {"saving": True, "resume": None}


def test_a_run_whose_saves_are_all_broken_does_not_start_over_unasked(stopped, muster, supervised) -> None:
    stopped.saved.run.checkpoint(10, 0).manifest.write_text("{}")
    for _ in range(2):  # put aside, and then as it was found
        code, err = muster()
        assert (code, supervised) == (66, [])
        assert "no checkpoint is complete" in err


# What is refused ----------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_left_alone(make, muster, supervised) -> None:
    folder = make().submitted(alive=True)
    before = folder.run.events.read_bytes()
    code, err = muster()
    assert (code, supervised) == (78, [])
    assert f"is not over (starting): its supervisor is pid {os.getpid()} on {socket.gethostname()}" in err
    assert folder.run.events.read_bytes() == before


@pytest.mark.parametrize(
    ("job", "words", "code", "said"),
    [
        ({**JOB, "checkpoint": None}, (), 66, "has no checkpoint: section"),
        ({"name": "b", "bench": {"operation": "hello"}}, (), 78, "a bench: job saves nothing"),
        (JOB, ("--from", "7"), 66, "no good checkpoint of step 7"),
        (JOB, ("--set", "train.model=nonesuch"), 65, "unknown model 'nonesuch'"),
        (JOB, ("--set", "train.batch_size=1"), 78, "is less than one sample for each of"),
    ],
)
def test_what_cannot_go_on_is_refused_and_left_as_it_was(make, muster, supervised, job, words, code, said) -> None:
    folder = make({key: value for key, value in job.items() if value is not None}).ended()
    before = {path: path.read_bytes() for path in folder.run.path.iterdir() if path.is_file()}
    got, err = muster(*words)
    assert (got, supervised) == (code, [])
    assert said in err
    assert {path: path.read_bytes() for path in folder.run.path.iterdir() if path.is_file()} == before


def test_a_direct_run_and_a_folder_without_submission_are_refused(make, muster) -> None:
    folder = make().submitted(transport="direct").event("ended", code=1, **{"class": "failed"})
    assert muster()[0] == 78
    folder.submitted().event("ended", code=1, **{"class": "failed"})
    folder.run.submission.unlink()
    code, err = muster()
    assert code == 73
    assert "submission.json: cannot be read" in err
    assert muster("nonesuch")[0] == 72


def test_a_copy_of_the_code_in_the_layout_of_before_is_refused(make, muster, supervised) -> None:
    """Its packages lay in <run>/code/muster itself, where this code would look for muster/launch."""
    folder = make(COMMAND).ended("failed", 3)
    old = folder.run.code / "muster"
    (old / "launch").mkdir(parents=True)
    submission = folder.submission()
    replace(submission, context=replace(submission.context, code=str(old))).write()
    code, err = muster()
    assert (code, supervised) == (78, [])
    assert f"{old} holds Muster's code in an older layout" in err
    (old / "muster").mkdir()
    assert muster()[0] == 42


# A supervisor that is gone ------------------------------------------------------------------------------------------


def test_what_a_lost_supervisor_left_is_ended_first(make, muster, supervised, start_process) -> None:
    folder = make().submitted()
    folder.saved.save(10)
    left = start_process(ID)
    assert muster()[0] == 42
    assert processes.start_ticks(left) is None
    assert last_row(folder, "ended")["message"] == "supervisor was gone; 1 leftover process ended"
    assert supervised[0].context.attempt == 1


def test_a_fresh_lease_of_another_host_is_respected(make, muster, supervised) -> None:
    folder = make().submitted(host="elsewhere")
    write_json(folder.run.lease, {"time": time.time(), "host": "elsewhere", "pid": 7})
    assert muster()[0] == 78
    assert supervised == []


def written(age_s: float) -> dict[str, Any]:
    return {"time": time.time() - age_s, "host": "elsewhere", "pid": 7}


def test_a_lease_that_may_be_old_is_watched(make, muster, supervised, monkeypatch) -> None:
    """Between half a minute and two the clocks may differ: only that it does not change proves anything."""
    monkeypatch.setattr(lease, "STALE_S", 1.0)
    folder = make().submitted(host="elsewhere")
    folder.saved.save(10)
    write_json(folder.run.lease, written(60.0))
    code, err = muster()
    assert (code, len(supervised)) == (42, 1)
    assert "waiting 1 s for a sign of life from its supervisor on elsewhere" in err


def test_a_sign_of_life_while_it_is_watched_keeps_the_run_as_it_is(make, muster, supervised, monkeypatch) -> None:
    monkeypatch.setattr(lease, "STALE_S", 20.0)
    folder = make().submitted(host="elsewhere")
    folder.saved.save(10)
    write_json(folder.run.lease, written(60.0))
    watching = threading.Event()

    def read(path: Path) -> Any:
        found = json.loads(path.read_text())
        watching.set()
        return found

    def renew() -> None:
        assert watching.wait(20)
        write_json(folder.run.lease, written(59.0))

    monkeypatch.setattr(resume, "read_json", read)
    renewing = threading.Thread(target=renew)
    renewing.start()
    code, err = muster()
    renewing.join()
    assert (code, supervised) == (78, [])
    assert "its supervisor on elsewhere has renewed its lease" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.batch_size=4", "train.batch_size 8, but the job has 4"),
        ("train.seed=3", "train.seed 0, but the job has 3"),
        ("train.precision=fp64", "train.precision fp32, but the job has fp64"),
        ("train.optimizer.name=adamw", "train.optimizer.name sgd, but the job has adamw"),
        ("train.model=gpt-micro", "train.model.name gpt-nano, but the job has gpt-micro"),
    ],
)
def test_what_must_stay_equal_is_refused_before_anything_is_written(stopped, muster, change: str, said: str) -> None:
    before = (stopped.run.job.read_text(), stopped.run.submission.read_text(), stopped.run.events.read_text())
    code, error = muster("--set", change)
    assert (code, f"step-00000010.a000: it was saved with {said}; set the saved value" in error) == (78, True), error
    assert (stopped.run.job.read_text(), stopped.run.submission.read_text(), stopped.run.events.read_text()) == before


def test_the_command_that_starts_anew_quotes_the_path_of_its_job() -> None:
    run = RunDir(Path("/runs $(id)/vgg"))
    with pytest.raises(RefusedError, match=r"muster run '/runs \$\(id\)/vgg/job.yaml' starts it again"):
        resume.check_kind(run, SimpleNamespace(kind="bench"))
