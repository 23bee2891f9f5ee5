"""What a submission's file holds, and that a supervisor on another machine reads the same from it."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from muster.jobs.basics.errors import RunFolderError
from muster.jobs.basics.files import append_line
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login, place
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.job import CommandSettings, Job
from muster.jobs.spec.site import Site
from muster.jobs.spec.train import TrainSettings
from muster.launch.common.kinds import BY_KEY
from muster.launch.plan.plan import Context
from muster.launch.plan.submission import Route, Submission

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
VARIABLES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)
NAME = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
PORT = st.none() | st.integers(1, 65535)
LOGINS = st.none() | st.builds(Login, NAME, st.none() | NAME, PORT)
HOSTS = st.builds(Host, NAME, st.sampled_from(["", "10.10.1.1", "fd00::1"]), st.none() | st.integers(1, 64), LOGINS)
HOST_SETS = st.builds(
    HostSet,
    st.lists(HOSTS, min_size=1, max_size=4).map(tuple),
    TEXT,
    st.lists(TEXT, max_size=3).map(tuple),
    st.dictionaries(NAME, TEXT, max_size=3),
)


def submission(run: RunDir, hosts: HostSet | None = None, *, kind: str = "command", **keys: Any) -> Submission:
    hosts = hosts or HostSet((Host("n0", "10.10.1.1", 4, Login("pc7", "alice", 2222)), Host("n1", "")), "-w n[0-1]")
    described: dict[str, Any] = {"command": CommandSettings(argv=["program", "a b", ""])}
    described["train"] = TrainSettings.model_validate({"model": "vgg11", "data": "digits", "steps": 3})
    job = Job(**{"name": "demo", "nodes": len(hosts.hosts), "kind": kind, "settings": described[kind], **keys})
    context = Context(
        job=job,
        site=Site.model_validate({"runs": "/runs", "ssh": {"user": "bob", "options": ["Compression=yes"]}}),
        placement=place(job, [replace(host, slots=None) for host in hosts.hosts]),
        run=run,
        workdir="/srv/job",
        python="/opt/muster/bin/python",
        entry=BY_KEY[kind].entry,
        options={"steps": 7},
        code="/srv/run/code",
        remote=True,
        iface="10.10.1.0/24",
    )
    return Submission(Route("ssh", hosts, fanout=8, port=61_001, secret="s", iface="10.10.1.0/24"), context)


@pytest.mark.parametrize("kind", ["command", "train"])
def test_a_supervisor_reads_what_was_submitted(run: RunDir, kind: str) -> None:
    made = submission(run, kind=kind, env={"A": "b\nc", "U": "🚀 $(no)"}, grace_s=7.5, setup=["module load 'x'"])
    made.write()
    read = Submission.read(run)
    assert read == made
    assert type(read.context.job.settings) is type(made.context.job.settings)


@settings(max_examples=40, deadline=None)
@given(hosts=HOST_SETS, env=st.dictionaries(VARIABLES, TEXT, max_size=3), argv=st.lists(TEXT, max_size=3), workdir=TEXT)
def test_whatever_is_submitted_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, hosts: HostSet, env: dict[str, str], argv: list[str], workdir: str
) -> None:
    made = submission(RunDir(tmp_path_factory.mktemp("run")), hosts, env=env)
    job = made.context.job.model_copy(update={"settings": CommandSettings(argv=["program", *argv])})
    made = replace(made, context=replace(made.context, job=job, workdir=workdir))
    made.write()
    assert Submission.read(made.context.run) == made


@given(hosts=HOST_SETS)
def test_hosts_survive_json(hosts: HostSet) -> None:
    assert TypeAdapter(HostSet).validate_python(json.loads(json.dumps(asdict(hosts)))) == hosts


def test_only_the_user_may_read_it(run: RunDir) -> None:
    """Its environment may hold keys, and its secret lets agents in."""
    submission(run).write()
    assert run.submission.stat().st_mode & 0o777 == 0o600


def test_what_the_job_file_left_out_stays_left_out(run: RunDir) -> None:
    """So that `muster why` and a later version can tell a wish from a default."""
    submission(run).write()
    assert Submission.read(run).context.job.model_fields_set == submission(run).context.job.model_fields_set


def test_each_reading_is_of_the_next_attempt(run: RunDir) -> None:
    submission(run).write()
    assert Submission.read(run).context.attempt == 0
    run.attempt(0).path.mkdir()
    assert Submission.read(run).context.attempt == 1


def test_an_attempt_that_began_no_rank_has_no_folder_and_keeps_its_number(run: RunDir) -> None:
    submission(run).write()
    run.attempt(0).path.mkdir()
    for attempt in range(3):
        append_line(run.attempts, {"attempt": attempt, "code": 69})
    assert Submission.read(run).context.attempt == 3


def test_local_nodes_are_told_from_those_of_other_machines(run: RunDir) -> None:
    made = submission(run)
    local = replace(made, route=Route("local", HostSet((), "this machine")))
    replace(local, context=replace(made.context, remote=False, iface=None)).write()
    assert not Submission.read(run).context.remote


def changed(run: RunDir, **changes: Any) -> None:
    submission(run).write()
    record = json.loads(run.submission.read_text())
    run.submission.write_text(json.dumps({**record, **changes}))


def test_one_that_was_made_before_nodes_had_keys_is_still_read(run: RunDir) -> None:
    """Its token is of no use any more: whoever resumes it draws a secret."""
    submission(run).write()
    record = json.loads(run.submission.read_text())
    record["route"]["token"] = record["route"].pop("secret")
    run.submission.write_text(json.dumps(record))
    assert Submission.read(run).route == replace(submission(run).route, secret="")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "version 99; this Muster reads 1"),
        ({"job": {"kind": "dance"}}, "cannot be read"),
        ({"job": {}}, "cannot be read"),
        ({"site": {"no_such_key": 1}}, "cannot be read"),
        ({"route": {}}, "cannot be read"),
        ({"route": None}, "cannot be read"),
        ({"placement": {"version": 7}}, "placement: found version 7"),
    ],
)
def test_one_that_was_tampered_with_is_refused_with_its_path(
    run: RunDir, changes: dict[str, Any], message: str
) -> None:
    changed(run, **changes)
    with pytest.raises(RunFolderError, match=message):
        Submission.read(run)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null", "7", "\udcff"])
def test_one_that_is_missing_or_no_record_is_refused(run: RunDir, text: str | None) -> None:
    if text is not None:
        run.submission.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RunFolderError, match=r"submission.json: cannot be read: .*; submit the job again"):
        Submission.read(run)
