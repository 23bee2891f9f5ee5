"""Start a rank without an agent: `python -m muster.jobs.train JOB.yaml` by hand, under torchrun, srun or mpirun.

Rank 0 creates the run folder and sends its path to the others through the store (`direct_run.py`). The launcher
receives the output of all ranks. Metrics and checkpoints are as in any run; `--resume RUN` continues from the newest
valid checkpoint.
"""

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import torch

from muster.jobs.basics import exits
from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.detect import LOCAL, Detected, Flags, detect
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.machine import network
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.direct import record
from muster.jobs.spec.conflicts import unread
from muster.jobs.spec.filled import fixed, with_fixed
from muster.jobs.spec.job import Job, JobKind
from muster.jobs.spec.load import load_job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.direct_run import begin_attempt, share_start
from muster.jobs.train.main import join_group, make_deterministic, settings_of, train_in
from muster.jobs.train.parallel.syncs import needs_group
from muster.jobs.world.guard import complain, guarded
from muster.jobs.world.meeting import connect, meet
from muster.jobs.world.world import GLOO_INTERFACES, World, choose_device

KIND: Final = JobKind("train", TrainSettings, "muster.jobs.train.main:run_rank", TrainSettings.check, unread)


def main(args: argparse.Namespace) -> NoReturn:
    """Train as one rank, with the arguments from `flags.parse`, then exit.

    The interpreter's cleanup is skipped, because a broken process group may change the exit code there.
    """
    code = exits.STOPPED
    try:
        code = guarded(lambda reporter: take_part(args, reporter))
    except KeyboardInterrupt:
        complain("muster: stopped by the user")
    except SystemExit as end:  # from the user's code
        code, text = exits.of_system_exit(end.code)
        if text:
            complain(text)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # on a full disk or a closed pipe, only the exit code matters now
                stream.flush()
        os._exit(code)


def take_part(args: argparse.Namespace, reporter: Reporter) -> int:
    """Detect this process's rank, meet the other ranks, and train."""
    loaded = load_job(Path(args.job), [KIND], args.overrides, allow_unread=args.resume is not None)
    detected = detect(os.environ, flags_of(args))
    env = detected.env
    try:
        given = loaded.job
        loaded = with_fixed(loaded, fixed(given, env.world_size, cores=cores_of(env)))
        job, settings = loaded.job, settings_of(loaded.job)
        settings.check(env.world_size)
    except RefusedError as error:
        raise RefusedError(f"{args.job}: {error}") from error
    warn_of_one_rank(job, detected)
    if job.python is not None and env.rank == 0:
        complain(
            f"muster: warning: {args.job}: python has no effect without an agent; this process runs in {sys.executable}"
        )
    for mistake in loaded.dropped if env.rank == 0 else ():
        complain(f"muster: warning: {mistake}")
    os.environ.update(job.env)
    make_deterministic(settings)
    use_interface_towards(env.master_addr)
    say_waiting(job, detected)
    store = connect(env, job.start_timeout_s)
    peers = meet(store, env, job.start_timeout_s)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hosts = [peer.host for peer in peers]
    start = share_start(store, lambda: begin_attempt(loaded, env, hosts, args), env)
    if args.resume is not None:
        job = fixed(given, env.world_size, cores=cores_of(env), run=start.run)

    torch.set_num_threads(threads_of(job, env))

    def work() -> int:
        if needs_group(settings.split(env.world_size)):
            world = join_group(store, job, env, peers)
        else:
            world = World(0, 1, None, choose_device(settings.device, 0, peers))
        return train_in(start, job, world, reporter)

    return record(start.run, start.attempt, work) if env.rank == 0 else work()


def flags_of(args: argparse.Namespace) -> Flags:
    """Return the command line's rank options."""
    return Flags(
        master_ip=args.master_ip,
        master_port=args.master_port,
        num_nodes=args.num_nodes,
        rank=args.rank,
        local_rank=args.local_rank,
        ranks_per_node=args.ranks_per_node,
    )


def warn_of_one_rank(job: Job, detected: Detected) -> None:
    """Warn that a job of several ranks was started as one rank, probably by mistake."""
    wanted = job.nodes * (1 if job.ranks_per_node == "slots" else job.ranks_per_node)
    if detected.launcher == LOCAL and wanted > 1:
        complain(
            f"muster: the job asks for {wanted} ranks, but this process runs alone "
            "(no rank variables found: see muster env); use --num-nodes and --rank to start more"
        )


def say_waiting(job: Job, detected: Detected) -> None:
    """Print where a rank that was started by hand waits for the others, and until when."""
    env, seconds = detected.env, job.start_timeout_s
    if detected.launcher == "flags" and env.world_size > 1:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        where = f"{env.master_addr}:{env.master_port}"
        complain(f"muster: rank {env.rank} of {env.world_size} waits for the others at {where} until {until}")


def cores_of(env: RankEnv) -> int | None:
    """Return the number of cores that all ranks share; None if they are on several nodes."""
    return len(os.sched_getaffinity(0)) if env.local_world_size == env.world_size else None


def threads_of(job: Job, env: RankEnv) -> int:
    """Return the number of threads of a rank; `auto` divides this process's cores among the node's ranks."""
    if job.threads_per_rank != "auto":
        return job.threads_per_rank
    return max(1, len(os.sched_getaffinity(0)) // env.local_world_size)


def use_interface_towards(address: str) -> None:
    """Set the network interface of gloo and NCCL to the one that reaches the master, unless gloo's is already set.

    By default gloo uses the address of the host name, which may not reach the master.
    """
    if GLOO_INTERFACES in os.environ:
        return
    if route := network.route_to(address):  # without a route, the attempt to connect reports the error
        os.environ[GLOO_INTERFACES] = route[0]
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={route[0]}")
