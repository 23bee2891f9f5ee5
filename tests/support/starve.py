"""A machine that hardly runs: a process and all below it are stopped most of the time."""

import signal
import time

from muster.jobs.machine import linux


def starve(root: int, *, cycles: int, stopped_s: float, running_s: float) -> None:
    """Stop a process and its descendants, let them run for a moment, and again; at the end they run."""
    for _ in range(cycles):
        family = [root, *linux.descendants(root)]
        for number, pause_s in ((signal.SIGSTOP, stopped_s), (signal.SIGCONT, running_s)):
            for pid in family:
                linux.kill_quietly(pid, number)
            time.sleep(pause_s)
