"""The first process of a node, which creates its namespaces, starts its daemons once, and reaps children.

    muster box  --starts-->  this, outside  --fork-->  this, process 1 of the node  --> sshd, slurmd, ...

When process 1 dies, the kernel kills every process of the node. If `muster box` dies before it has answered "go",
process 1 also ends. So an interrupted `muster box up` leaves no unknown process behind.

    python -I ROOT/launch/boot.py cloudlab.box.init PLAN [LOCK]

LOCK is an open descriptor that holds the box's lock until process 1 gets "go" or ends. `muster box down` waits for
that lock.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

from muster.cloudlab.box import kernel
from muster.cloudlab.box.plan import BoxNodePlan, Service
from muster.jobs.basics.reading import read_bytes
from muster.jobs.machine.procfs import start_ticks

GO: Final = b"go\n"
READY: Final = b"ready\n"
FAILED: Final = 1
DETACH_S: Final = 20.0


def main() -> int:
    """Enter a node's namespaces, fork its process 1, and set the node up there."""
    plan = BoxNodePlan.from_json(read_bytes(Path(sys.argv[1])))
    kernel.enter_network(Path(plan.netns))
    kernel.leave(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWPID)
    if os.fork():
        return 0
    return _inside(plan, held=[int(word) for word in sys.argv[2:]])


def _inside(plan: BoxNodePlan, held: list[int]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    _write_identity(Path(plan.identity))  # before /proc is mounted for the node
    socket.sethostname(plan.node)
    _mount(plan)
    os.write(1, READY)
    if os.read(0, len(GO)) != GO:
        return FAILED  # muster box died before it registered this node
    for descriptor in held:
        os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for service in plan.services:
        pid = _start(service)
        if service.detaches:
            _await_end(pid, service)
    while True:
        _reap()
        signal.sigwait([signal.SIGCHLD])


def _write_identity(path: Path) -> None:
    """Write this process's pid on the host and its start time, which together identify it."""
    pid = int(os.readlink("/proc/self"))  # noqa: PTH115 (the target is a number, not a path)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"pid": pid, "start": start_ticks(pid)}) + "\n", encoding="utf-8")
    fresh.rename(path)


def _mount(plan: BoxNodePlan) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_SLAVE)  # unmounts on the host also apply here
    kernel.mount("run", "/run", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    kernel.mount("shm", "/dev/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")
    kernel.mount("proc", "/proc", "proc", kernel.SAFE)
    Path("/run/sshd").mkdir(mode=0o755)
    # A new sysfs shows the node's own links in /sys/class/net. slurmd needs the cgroup mount, which stays empty.
    kernel.mount("sysfs", "/sys", "sysfs", kernel.SAFE)
    kernel.mount("cgroup", "/sys/fs/cgroup", "tmpfs", kernel.SAFE, "mode=755,size=1m")
    for source, target in plan.binds:
        kernel.mount(source, target, None, kernel.MS_BIND)


def _start(service: Service) -> int:
    log = os.open(service.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    actions = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    try:
        return os.posix_spawn(
            service.argv[0],
            service.argv,
            dict(service.environment),
            file_actions=actions,
            setsid=True,
            setsigmask=[],
        )
    finally:
        os.close(log)


def _await_end(pid: int, service: Service) -> None:
    deadline = time.monotonic() + DETACH_S
    while (left := deadline - time.monotonic()) > 0:
        if (status := _reap(pid)) is None:
            signal.sigtimedwait([signal.SIGCHLD], left)
            continue
        if status == 0:
            return
        raise SystemExit(f"{service.name} ended with status {status}; see {service.log}")
    raise SystemExit(f"{service.name} was not ready within {DETACH_S:.0f} s; see {service.log}")


def _reap(wanted: int = 0) -> int | None:
    """Reap all ended processes; return the exit code of process `wanted` if it has ended, else None."""
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                found = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return found
    return found


if __name__ == "__main__":
    sys.exit(main())
