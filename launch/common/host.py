"""Which process this is, and which GPUs its host shows. Every agent imports this before it greets."""

import os

from muster.jobs.machine.procfs import start_ticks


def identity() -> dict[str, object]:
    """Say which process on which host this is."""
    return {"host": os.uname().nodename, "pid": os.getpid(), "pid_start": start_ticks("self")}


def visible_gpus() -> list[str]:
    """List this host's GPUs as CUDA_VISIBLE_DEVICES would: what the user left visible, else all device files."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    files = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdecimal()]  # noqa: PTH208
    return [str(number) for number, _ in enumerate(files)]
