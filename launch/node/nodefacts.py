"""Facts about a node, as the answer to an `Inspect` message: resources, software, and whether it reaches a peer.

Each fact is collected in its own thread, and all threads share one deadline, because any of them can hang: on a dead
file server, a GPU driver or a silent peer. A fact that cannot be found is missing from the answer, and `failed` gives
the reason.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.machine import free, network, procfs
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import gitfacts
from muster.launch.common.fingerprint import fingerprint
from muster.launch.common.program_files import fault
from muster.launch.common.storage import is_shared
from muster.launch.wire.messages import Inspect
from muster.launch.wire.records import Facts

DEADLINE_S: Final = 4.0
REACH_S: Final = 3.0
MIB: Final = 1 << 20

OF_JOB: Final = "Python of the job"
OF_PYTHON: Final = ("python", "executable", "torch")
ASKED: Final = """
import json, sys
from importlib import metadata
torch = [each.version for each in metadata.distributions(name="torch")] or [None]
version = "{}.{}.{}".format(*sys.version_info[:3])
print(json.dumps({"python": version, "executable": sys.executable, "torch": torch[0]}))
"""  # the job's Python runs this, so it must work in any Python version

Probe = Callable[[], Any]
EVERYTHING: Final = Inspect()


def facts(request: Inspect = EVERYTHING) -> Facts:
    """Return the requested facts that can be found within the deadline; never raises.

        (no field)        host, versions, cores, memory, GPUs and limits of this node
        program, script   whether this node has them; a program given by name is also searched for in `folder`
        python            the version of the job's own Python and of its torch, instead of this process's
        peer, port        the route to a peer, and whether its port answers
        run, nonce, mark  whether this node sees a run folder that contains a nonce, and can write a mark there

    A request may combine the first three rows, or the last two.
    """
    probes: dict[str, Probe] = {}
    if request.run:
        probes["storage"] = partial(storage, request)
    if request.peer:
        probes |= {"route": partial(route, request), "connect": partial(connect, request)}
    if not probes:
        probes |= STANDING
    if request.program or request.script:
        probes["program"] = partial(fault, request.program, request.script, request.folder)
    if not request.python:
        return run_probes(probes, DEADLINE_S)
    found = run_probes({**probes, OF_JOB: partial(of_job, request)}, DEADLINE_S)
    return about_ranks(cast(dict[str, Any], found))


def about_ranks(found: dict[str, Any]) -> Facts:
    """Replace the facts about this process's Python with the facts about the job's own Python."""
    why = found["failed"].pop(OF_JOB, "")
    others = {name: value for name, value in found.items() if name not in (*OF_PYTHON, OF_JOB)}
    found["failed"] |= dict.fromkeys(OF_PYTHON, why) if why else {}
    return cast(Facts, {**others, **found.get(OF_JOB, {})})


def of_job(request: Inspect) -> dict[str, str | None]:
    """Run the job's own Python to find its version, its path and the version of its torch."""
    path = os.pathsep.join(filter(None, (request.folder, os.environ.get("PATH", os.defpath))))
    done = subprocess.run(
        [*request.python, "-c", ASKED],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        env={**os.environ, "PATH": path},
    )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        raise OSError(f"{request.python[0]}: ended with code {done.returncode}: {said}")
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return {name: found[name] for name in OF_PYTHON}


def run_probes(probes: Mapping[str, Probe], deadline_s: float) -> Facts:
    """Run all probes in parallel, and abandon probes that exceed the deadline."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def probe(name: str, function: Probe) -> None:
        try:
            found[name] = function()
        except Exception as error:  # `failed` reports errors of any type
            failed[name] = str(error) or type(error).__name__

    threads = {
        name: threading.Thread(target=probe, args=(name, function), daemon=True, name=f"inspect {name}")
        for name, function in probes.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + deadline_s
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            failed[name] = f"took longer than {deadline_s:g} s"
    known = {name: why for name, why in failed.items() if name not in found}
    return cast(Facts, {**found, "failed": known})


# Identity ------------------------------------------------------------------------------------------------------------


def machine() -> str:
    """Return an id of this machine: the same under all of its names, and different from all other machines."""
    return f"{procfs.boot_id()} {socket.gethostname()}"  # containers on one machine share the boot id


def version(package: str) -> str | None:
    """Return a package's version without importing it; None if it is not installed, as Muster itself may not be."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of Muster's code, with + if files were changed since; None if the code is not a git clone."""
    try:
        return gitfacts.short_commit(CODE_ROOT, "muster/__init__.py", deadline_s=DEADLINE_S / 2)
    except gitfacts.GitError:
        return None


# Resources -----------------------------------------------------------------------------------------------------------


def cores() -> int:
    """Return how many cores this process may use: the size of its affinity mask, or its cgroup's quota if smaller."""
    available = len(os.sched_getaffinity(0))
    for group in free.own_groups("cpu"):
        files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(procfs.text_of(group / name) for name in files).split()
        quota, period = words if len(words) == 2 else ("max", "1")
        if quota.isdecimal():
            available = min(available, max(1, round(int(quota) / int(period))))
    return available


def memory() -> dict[str, int]:
    """Return this node's total and available memory in MiB, within the limits of our control group."""
    return {"total_mib": free.all_bytes() // MIB, "available_mib": free.free_bytes() // MIB}


def gpus() -> list[str]:
    """Return the names of this node's GPUs, or "GPU" for each device file if nvidia-smi is not installed."""
    if shutil.which("nvidia-smi") is None:
        return ["GPU" for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdecimal()]  # noqa: PTH208
    argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S)
    if done.returncode != 0:
        raise OSError(f"nvidia-smi: {(done.stdout + done.stderr).strip().partition(chr(10))[0]}")
    return done.stdout.strip().splitlines()


def limits() -> dict[str, int]:
    """Return the limits on open files; -1 means unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"open_files": soft, "open_files_hard": hard}


# Reachability --------------------------------------------------------------------------------------------------------


def route(request: Inspect) -> list[str] | None:
    """Return the interface that leads to the peer and this node's address on it; None if there is no route."""
    chosen = network.choose(network.own_addresses(), request.iface) if request.iface else None
    found = chosen or network.route_to(request.peer)
    return list(found) if found else None


def connect(request: Inspect) -> str:
    """Return "" if the peer's port accepts a connection, else the error."""
    try:
        socket.create_connection((request.peer, request.port), timeout=REACH_S).close()
    except TimeoutError:
        return f"no answer within {REACH_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def storage(request: Inspect) -> dict[str, Any]:
    """Return whether this node sees and can write the run folder, and the free space in the folder that it would use.

    {"where": "shared" | "apart" | "none", "path": ..., "free_mib": ..., "why": the reason why it cannot write}
    """
    run = RunDir(Path(request.run))
    if is_shared(run, request.nonce):
        why = _try_to_write(run.nonce(request.mark), request.nonce)
        return {"where": "none" if why else "shared", "path": str(run.path), "why": why, **_free(run.path)}
    why = ""
    for folder in (
        _existing(run.path.parent),
        Path(tempfile.gettempdir()),
    ):  # the folders that launch/common/storage.py tries
        if os.access(folder, os.W_OK | os.X_OK):
            return {"where": "apart", "path": str(folder), "why": "", **_free(folder)}
        why = why or f"{folder}: cannot be written by this user"
    return {"where": "none", "path": "", "why": why}


def _try_to_write(path: Path, text: str) -> str:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a full disk or a quota may be reported only here
    except OSError as error:
        return f"{path.parent}: cannot be written: {error.strerror}"
    return ""


def _existing(folder: Path) -> Path:
    return next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))


def _free(folder: Path) -> dict[str, int]:
    status = os.statvfs(folder)
    return {"free_mib": status.f_bavail * status.f_frsize // MIB}


STANDING: Final[Mapping[str, Probe]] = {
    "host": socket.gethostname,
    "machine": machine,
    "python": lambda: "{}.{}.{}".format(*sys.version_info[:3]),
    "executable": lambda: sys.executable,
    "root": lambda: str(CODE_ROOT),
    "code": fingerprint,
    "commit": commit,
    "torch": partial(version, "torch"),
    "muster": partial(version, "muster"),
    "cores": cores,
    "memory": memory,
    "gpus": gpus,
    "limits": limits,
}


if __name__ == "__main__":
    print(json.dumps(facts()))
