"""Resume a run that has ended or lost its supervisor: make the submission for its next attempt.

    is it over?  ──→  the old submission, with the requested changes   ──→  is there a checkpoint?  ──→  written back
    lost: leftovers are ended first                 (prepare.py)                   (the supervisor chooses and reads it)

All checks are made before anything in the run is changed.
"""

import os
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import NoCheckpointError, RefusedError, RunFolderError
from muster.jobs.basics.files import write_secret
from muster.jobs.basics.reading import read_bytes
from muster.jobs.basics.words import counted
from muster.jobs.checkpoint.choose import has_commits, newest_good
from muster.jobs.hosts.hosts import HostSet, choose
from muster.jobs.hosts.placement import Placement
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.job import Job
from muster.jobs.spec.kept import KEPT, require_settings
from muster.jobs.spec.train import TrainSettings
from muster.launch.plan.submission import Route, Submission
from muster.launch.records import lease
from muster.launch.records.eventlog import EventLog
from muster.launch.records.runrows import had_session, read_json
from muster.launch.records.runstate import DIRECT, RunState, read_state
from muster.launch.submit.hostsource import site_of
from muster.launch.submit.prepare import PreparedSubmission, prepare, route_of
from muster.launch.submit.request import Request
from muster.launch.submit.stopping import end_leftovers, stop
from muster.launch.transports.base import LEASE_S

POLL_S: Final = 0.1
NODES_S: Final = LEASE_S + 3.0  # after this time, no node of a lost supervisor still runs ranks
OF_HOSTS: Final = ("ssh", "pdsh", "hand")

Say = Callable[[str], None]


def again(run: RunDir, request: Request, wanted: str | None, say: Say) -> PreparedSubmission:
    """Return a run's submission for its next attempt; end the processes that a lost supervisor left behind.

    `request`: the requested changes. `wanted`: the step or the name of the checkpoint to resume from.

    Raises:
        RefusedError: if the run is not over, is done, cannot be resumed, or no longer fits the hosts.
        NoCheckpointError: if the job saves nothing, no checkpoint is good, or the wanted one does not exist.
        UsageError, JobFileError, RunFolderError: as for a start.
    """
    state = read_state(run)
    if not state.is_over:
        refuse_running(run, state)
    if state.transport == DIRECT:
        how = f"continue it with: {state.continue_with}" if state.continue_with else "start it again in the same way"
        raise RefusedError(f"{run.run_id}: was started directly, not by muster run; {how}")
    before = Submission.read(run)
    prepared = changed(run, before, request, wanted)
    job = prepared.context.job
    for mistake in prepared.loaded.dropped:
        say(f"{mistake.key}: {mistake.text}; the run continues without it")
    check_kind(run, job)
    if state.state == "done":
        check_longer(run, before.context.job, job, wanted=wanted)
    if state.state == "lost":
        end_lost(run, state, remote=before.context.remote, say=say)
    check_saved(run, job, wanted, say)
    return prepared


# Checks whether it may resume ----------------------------------------------------------------------------------------


def refuse_running(run: RunDir, state: RunState) -> None:
    """Refuse a run that may still be supervised; accept one without any recent sign of life.

    Raises:
        RefusedError: if the run is in progress, or may be.
    """
    where = f"its supervisor is pid {state.pid} on {state.host}"
    ways = f"{run.command('status')} shows it, {run.command('stop')} ends it"
    if state.message:  # Slurm's description of the state
        raise RefusedError(f"{run.run_id}: is not over ({state.label}): {state.message}; {ways}")
    if state.sure:
        raise RefusedError(f"{run.run_id}: is not over ({state.label}): {where}; {ways}")
    if state.state != "lost":
        raise RefusedError(f"{run.run_id}: may still be running: {where}; resume it there, or stop it there first")


def watch_lease(run: RunDir, say: Say) -> None:
    """Check that a supervisor on another host is gone, by watching for STALE_S seconds that its lease does not change.

    Raises:
        RefusedError: if the lease has been renewed.
    """
    seen = read_json(run.lease)
    say(f"waiting {lease.STALE_S:g} s for a sign of life from its supervisor on {seen.get('host')}")
    deadline = time.monotonic() + lease.STALE_S
    while time.monotonic() < deadline:
        if read_json(run.lease) != seen:
            raise RefusedError(f"{run.run_id}: still runs: its supervisor on {seen.get('host')} has renewed its lease")
        time.sleep(POLL_S)


def end_lost(run: RunDir, state: RunState, *, remote: bool, say: Say) -> None:
    """End the processes that a lost supervisor left on this host, and wait until its nodes have ended theirs.

    Raises:
        RefusedError: if the supervisor is alive after all.
        StartTimeoutError: if a process cannot be ended.
    """
    if not state.sure:
        watch_lease(run, say)
    elif run.slurm.exists():
        stop(run, grace_s=None, now=True)  # the rest of its Slurm job still occupies nodes
        return
    deadline = time.monotonic() + NODES_S
    age_s = lease.age_s(run)
    if remote and age_s is not None and age_s < NODES_S:
        say(f"waiting up to {NODES_S - age_s:.0f} s for the nodes of its lost supervisor to end their ranks")
        while (lease.age_s(run) or NODES_S) < NODES_S and time.monotonic() < deadline:
            time.sleep(POLL_S)
    end_leftovers(run, term_s=1.0, message="supervisor was gone")


def check_kind(run: RunDir, job: Job) -> None:
    """Refuse a kind of job that has nothing to resume. A user's program is simply started again.

    Raises:
        RefusedError: if it is a benchmark.
    """
    if job.kind not in ("train", "command"):
        raise RefusedError(
            f"{run.run_id}: a {job.kind}: job saves nothing; muster run {shlex.quote(str(run.job))} starts it again"
        )


def check_longer(run: RunDir, before: Job, after: Job, *, wanted: str | None) -> None:
    """Refuse to resume a run that is done, except to train longer or from an earlier checkpoint.

    Raises:
        RefusedError: if there is nothing left to do.
    """
    if wanted is not None:
        return
    anew = f"muster run {shlex.quote(str(run.job))} starts a new run"
    if not isinstance(before.settings, TrainSettings) or not isinstance(after.settings, TrainSettings):
        raise RefusedError(f"{run.run_id}: is done; {anew}")
    key = "steps" if before.settings.steps is not None else "epochs"
    had, has = getattr(before.settings, key) or 1, getattr(after.settings, key)
    if has is None or has <= had:
        raise RefusedError(
            f"{run.run_id}: is done ({counted(had, key[:-1])}); to train longer, raise the limit: "
            f"{run.command('resume')} --set train.{key}={2 * had}; {anew}"
        )


def check_saved(run: RunDir, job: Job, wanted: str | None, say: Say) -> None:
    """Check that a checkpoint exists, which the supervisor will verify. If none was saved, the run starts at step 0.

    A program without a session saves nothing here, and starts again.

    Raises:
        NoCheckpointError: if the job saves nothing, no checkpoint is good, or the `wanted` one does not exist.
        RefusedError: if the checkpoint was saved with other settings than the job has now.
    """
    if job.kind == "command" and wanted is None and not has_commits(run):
        if had_session(run):
            say(f"{run.run_id}: nothing was saved before it ended: it starts again from step 0")
        return
    if job.kind == "train" and job.checkpoint is None:
        raise NoCheckpointError(
            f"{run.run_id}: the job has no checkpoint: section, so nothing was saved; start it again with one: "
            f"muster run {shlex.quote(str(run.job))} --set checkpoint.every_s=auto"
        )
    chosen = newest_good(run, say=say, deep=False, mark=False, **_asked(wanted))
    if chosen is None:
        if has_commits(run):
            raise NoCheckpointError(
                f"{run.checkpoints}: no checkpoint is complete ({run.command('checkpoint list')}); "
                f"start it anew: muster run {shlex.quote(str(run.job))}"
            )
        say(f"{run.run_id}: nothing was saved before it ended: it starts again from step 0")
        return
    if isinstance(job.settings, TrainSettings):
        saved, steps = chosen.manifest.step, job.settings.steps
        if steps is not None and steps < saved:
            raise RefusedError(
                f"{run.run_id}: train.steps: {steps} is less than the {saved} steps of {chosen.folder.name}; "
                f"give more steps, or go back with --from STEP ({run.command('checkpoint list')})"
            )
        require_settings(chosen.manifest.meta.get(KEPT), job.settings, chosen.folder.name)


def _asked(wanted: str | None) -> dict[str, Any]:
    if wanted is None:
        return {}
    return {"step": int(wanted)} if wanted.isdecimal() else {"name": wanted}


# The next attempt ---------------------------------------------------------------------------------------------------


def changed(run: RunDir, before: Submission, request: Request, wanted: str | None) -> PreparedSubmission:
    """Return the submission, changed only where the command line asks for it."""
    if not run.job.is_file():
        raise RunFolderError(f"{run.path}: has no job.yaml; submit the job again")
    other_site = request.site is not None
    new = replace(request, job=str(run.job), site=request.site or str(run.site))
    if not new.names_hosts:
        new = replace(new, on=new.on or before.route.transport)
    prepared = prepare(new, route=_route(before.route, new), resumed=run, allow_unread=True)
    was, now = before.context, prepared.context
    moved = any(each.partition("=")[0] == "workdir" for each in request.overrides)
    renamed = other_site or now.job.python != was.job.python
    code = now.code if other_site and now.site.code else was.code
    if code is not None and Path(code, "launch").is_dir() and not Path(code, "muster").is_dir():
        raise RefusedError(
            f"{run.run_id}: {code} holds Muster's code in an older layout, which this Muster cannot start; "
            "resume the run with the Muster that submitted it, or submit its job again"
        )
    return prepared.changed(
        run=run,
        attempt=was.attempt,
        workdir=now.workdir if moved else was.workdir,
        python=now.python if other_site else was.python,
        interpreter=now.interpreter if renamed else was.interpreter,
        code=code,
        placement=now.placement if request.master_addr else _meeting(was.placement, now.placement),
        # This choice is only for this attempt: a later one uses the newest checkpoint again.
        options={"from": next(iter(asked.values())), "from_attempt": was.attempt} if (asked := _asked(wanted)) else {},
    )


def _route(before: Route, request: Request) -> Route:
    """Return the previous transport and hosts, unless the command line names others."""
    elsewhere = request.on != before.transport and (request.on not in OF_HOSTS or not before.hosts.hosts)
    if request.names_hosts or elsewhere:
        return route_of(request, site_of(request))
    hosts: HostSet = before.hosts
    if request.on in OF_HOSTS and (request.include or request.exclude):
        hosts = replace(hosts, hosts=tuple(choose(hosts.hosts, request.include, request.exclude)))
    return replace(
        before,
        transport=request.on or before.transport,
        hosts=hosts,
        fanout=request.fanout or before.fanout,
        port=request.port or before.port,
        iface=request.iface or before.iface,
        secret="",
    )


def _meeting(before: Placement, now: Placement) -> Placement:
    """Keep the user's address of node 0, as long as node 0 is the same host."""
    same = before.nodes[0].host == now.nodes[0].host and before.one_host == now.one_host
    return now.meeting_at(before.master_addr) if same and before.master_addr else now


# Writing back -------------------------------------------------------------------------------------------------------


def write(prepared: PreparedSubmission, changes: Sequence[str]) -> Submission:
    """Overwrite the run's submission, keep a copy of the old job file, and record the changes in the events.

    Raises:
        RunFolderError, StorageError: if the folder cannot be written.
    """
    submission, context = prepared.submission, prepared.context
    run, earlier = context.run, read_bytes(context.run.job).decode()
    same = earlier == prepared.loaded.text
    if not same:
        write_secret(run.job_before(context.attempt), earlier)
    EventLog(run).event(
        "resumed",
        attempt=context.attempt,
        by=f"{socket.gethostname()}:{os.getpid()}",
        changes=[each.partition("=")[0] + "=..." if each.startswith("env.") else each for each in changes],
        **context.options,
        **({} if same else {"job": run.job_before(context.attempt).name}),
    )
    if not same:
        write_secret(run.job, prepared.loaded.text)
    write_secret(run.site, prepared.site_text)
    submission.write()
    for old in (run.stop, run.slurm, run.sbatch):  # files of earlier attempts: a stop request, and the Slurm job
        old.unlink(missing_ok=True)
    return submission
