"""The identity of this process, and the GPUs visible on this host. Agents import this module before their hello."""

import os

from muster.jobs.machine.procfs import start_ticks


def identity() -> dict[str, object]:
    """Return this process's host, pid and start time in clock ticks."""
    return {"host": os.uname().nodename, "pid": os.getpid(), "pid_start": start_ticks("self")}


def visible_gpus() -> list[str]:
    """List this host's GPUs in the form of CUDA_VISIBLE_DEVICES: the user's value if set, else all device files."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    files = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdecimal()]  # noqa: PTH208
    return [str(number) for number, _ in enumerate(files)]
