"""A start without an agent: `python -m jobs.train JOB.yaml` by hand, under torchrun, srun or mpirun.

Rank 0 makes the run folder, tells the others its path through the store, and writes the few events that `muster
status` and `why` read. Everybody's output stays where it is; metrics are the same as in any run.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from jobs import exits, network
from jobs.detect import LOCAL, Detected, Flags, detect
from jobs.errors import MusterError, RefusedError, RunFolderError
from jobs.files import append_line, write_json, write_text
from jobs.load import LoadedJob, load_job
from jobs.placement import NodePlacement, Placement
from jobs.ranks import RankEnv
from jobs.reports import Reporter
from jobs.rundir import RunDir, new_run, runs_root
from jobs.spec import Job, JobKind, TrainSettings
from jobs.train.main import FAILED, complain, guarded, join_group, make_deterministic, settings_of, train_in
from jobs.train.meeting import connect, meet
from jobs.train.modes import needs_group
from jobs.train.world import GLOO_INTERFACES, World, choose_device

KIND: Final = JobKind("train", TrainSettings, "jobs.train.main:run_rank", TrainSettings.check)
RUN_FOLDER_KEY: Final = "run-folder"
LAST_WORD_S: Final = 5.0
ATTEMPT: Final = 0
START_TICKS_FIELD: Final = 19  # of /proc/PID/stat, counted after the name


def main(args: argparse.Namespace) -> NoReturn:
    """Train as one rank, with the arguments that `flags.parse` read.

    It ends without the interpreter's farewell, in which a broken group may change the code.
    """
    code = exits.STOPPED
    try:
        code = guarded(lambda reporter: start(args, reporter))
    except KeyboardInterrupt:
        complain("muster: stopped by the user")
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # on a full disk, or for a reader that has gone; the code is what counts now
                stream.flush()
        os._exit(code)


def start(args: argparse.Namespace, reporter: Reporter) -> int:
    """Find out which rank this is, meet the others, train."""
    loaded = load_job(Path(args.job), [KIND], args.overrides)
    job, settings = loaded.job, settings_of(loaded.job)
    detected = detect(os.environ, flags_of(args))
    env = detected.env
    try:
        settings.check(env.world_size)
    except RefusedError as error:
        raise RefusedError(f"{args.job}: {error}") from error
    warn_of_one_rank(job, detected)
    os.environ.update(job.env)
    torch.set_num_threads(threads_of(job, env))
    make_deterministic(settings)
    use_interface_towards(env.master_addr)
    store = connect(env, job.start_timeout_s)
    peers = meet(store, env, job.start_timeout_s)
    hosts = [peer.host for peer in peers]
    run = share_folder(store, lambda: make_folder(loaded, env, hosts, args), env)

    def work() -> None:
        if needs_group(settings.split(env.world_size).sync, env.world_size):
            world = join_group(store, job, env, peers)
        else:
            world = World(0, 1, None, choose_device(settings.device, 0, peers))
        train_in(run, job, world, reporter, attempt=ATTEMPT)

    if env.rank == 0:
        record(run, work)
    else:
        work()
    return exits.DONE


def flags_of(args: argparse.Namespace) -> Flags:
    """Return what the command line says of ranks."""
    return Flags(
        master_ip=args.master_ip,
        master_port=args.master_port,
        num_nodes=args.num_nodes,
        rank=args.rank,
        local_rank=args.local_rank,
        ranks_per_node=args.ranks_per_node,
    )


def warn_of_one_rank(job: Job, detected: Detected) -> None:
    """Say that a job of several ranks was started as one, which nobody may have meant."""
    wanted = job.nodes * (1 if job.ranks_per_node == "slots" else job.ranks_per_node)
    if detected.launcher == LOCAL and wanted > 1:
        complain(
            f"muster: the job asks for {wanted} ranks, this start has 1 (no rank variables found: see muster env); "
            "--num-nodes and --rank start more"
        )


def threads_of(job: Job, env: RankEnv) -> int:
    """Return the threads of a rank; `auto` shares the cores that this process may use among the node's ranks."""
    if job.threads_per_rank != "auto":
        return job.threads_per_rank
    return max(1, len(os.sched_getaffinity(0)) // env.local_world_size)


def use_interface_towards(address: str) -> None:
    """Name the network interface that reaches the master, unless somebody has: gloo goes by the host's name."""
    if GLOO_INTERFACES in os.environ:
        return
    if route := network.route_to(address):  # else the start itself will say that there is no way
        os.environ[GLOO_INTERFACES] = route[0]
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={route[0]}")


def share_folder(store: Store, make: Callable[[], RunDir], env: RankEnv) -> RunDir:
    """Make the run folder on rank 0 and tell its path to all.

    Raises:
        RunFolderError, StorageError: it cannot be made; on every rank, for rank 0 tells that too.
    """
    if env.rank != 0:
        said = json.loads(store.get(RUN_FOLDER_KEY))  # waits as long as `connect` was allowed to
        store.set(f"{RUN_FOLDER_KEY}/read/{env.rank}", "")
        if "error" in said:
            raise RunFolderError(f"rank 0: {said['error']}")
        return RunDir(Path(said["path"]))
    try:
        run = make()
    except MusterError as error:
        store.set(RUN_FOLDER_KEY, json.dumps({"error": str(error)}))
        readers = [f"{RUN_FOLDER_KEY}/read/{rank}" for rank in range(1, env.world_size)]
        with suppress(DistStoreError):  # the store ends with this process: let the others read first
            store.wait(readers, timedelta(seconds=LAST_WORD_S))
        raise
    store.set(RUN_FOLDER_KEY, json.dumps({"path": str(run.path)}))
    return run


def make_folder(loaded: LoadedJob, env: RankEnv, hosts: list[str], args: argparse.Namespace) -> RunDir:
    """Make the run folder with the job, its placement as far as the ranks know it, and the first events."""
    run = new_run(runs_root(args.runs), loaded.job.name)
    placement = placement_of(env, hosts)
    write_text(run.job, loaded.text)
    folder = run.attempt(ATTEMPT)
    folder.path.mkdir()
    write_json(folder.placement, placement.to_json())
    submitted = {
        "run_id": run.run_id,
        "name": loaded.job.name,
        "kind": loaded.job.kind,
        "nodes": len(placement.nodes),
        "world_size": env.world_size,
        "transport": "direct",
        "host": hosts[0],
        "pid": os.getpid(),
        "pid_start": pid_start(),
        "grace_s": loaded.job.grace_s,
    }
    # The run began with this process, not when its ranks had met.
    append_line(run.events, {"time": args.began, "event": "submitted", **submitted})
    where = {"world_size": env.world_size, "master_addr": env.master_addr, "master_port": env.master_port}
    event(run, "attempt", {"attempt": ATTEMPT, **where})
    print(f"run {run.path}", flush=True)
    return run


def placement_of(env: RankEnv, hosts: list[str]) -> Placement:
    """Return where the ranks run: a node is a row of ranks on one host, and pretend nodes share theirs."""
    each = env.local_world_size
    even = env.nodes * each == env.world_size
    nodes: list[NodePlacement] = []
    for (_, host), group in groupby(range(env.world_size), key=lambda rank: (rank // each if even else 0, hosts[rank])):
        block = list(group)
        address = env.master_addr if not nodes else host
        nodes.append(NodePlacement(len(nodes), host, address, block[0], len(block)))
    return Placement(tuple(nodes), env.world_size, env.master_addr)


def record(run: RunDir, work: Callable[[], None]) -> None:
    """Do rank 0's work and write how it ended; without an agent nobody knows of the other ranks."""
    began = time.time()
    code, message = exits.DONE, "done"
    try:
        work()
    except BaseException as error:
        code, message = _ending(error)
        raise
    finally:
        verdict = {"code": code, "class": exits.class_of(code), "message": message}
        row = {"attempt": ATTEMPT, "started": began, "ended": time.time(), **verdict}
        with suppress(MusterError):  # a full disk has been reported by what first met it
            append_line(run.attempts, {**row, "next_step": "", "first": None, "victims": []})
            event(run, "ended", {"attempt": ATTEMPT, **verdict})


def event(run: RunDir, name: str, values: dict[str, Any]) -> None:
    """Append one event."""
    append_line(run.events, {"time": time.time(), "event": name, **values})


def pid_start() -> int:
    """Return when this process began, in clock ticks after boot: with the pid it names one process for good."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(after_name[START_TICKS_FIELD])


def _ending(error: BaseException) -> tuple[int, str]:
    if isinstance(error, MusterError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return exits.STOPPED, "stopped by the user"
    return FAILED, f"rank 0: {type(error).__name__}: {error}"
