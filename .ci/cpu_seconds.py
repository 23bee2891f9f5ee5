"""Count the CPU seconds of the stages and tests of `.ci/run`: `run NAME COMMAND ...`, `print`.

Both use the file that CPU_SECONDS names: lines of seconds, kind (stage or test) and name, with tabs between.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

DEAREST = 30
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run(name: str, command: list[str]) -> int:
    """Run a command, and write how much CPU time it and all its descendants used. Return its exit code.

    Processes that outlive their parent, like a supervisor of `muster submit`, become children of this process, which
    waits for them while the command runs: else their time would count nowhere.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command too
    # No posix_spawn: the C library has it ignore a signal of its own, which every program of the tests would inherit.
    child = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while True:
        pid, status = os.wait()
        if pid == child.pid:  # keeps the object alive: a Popen that is deleted may take the status of its process
            break
    times = os.times()
    with Path(os.environ["CPU_SECONDS"]).open("a", encoding="utf-8") as file:
        file.write(f"{times.children_user + times.children_system:.2f}\tstage\t{name}\n")
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def show() -> None:
    """Print the CPU seconds of each stage, of all together, and of the dearest tests."""
    spent: dict[str, Counter[str]] = {"stage": Counter(), "test": Counter()}
    for line in Path(os.environ["CPU_SECONDS"]).read_text(encoding="utf-8").splitlines():
        seconds, kind, name = line.split("\t")
        spent[kind][name] += float(seconds)
    print(f"CPU seconds: {spent['stage'].total():.0f}, by stage")
    for name, seconds in spent["stage"].items():
        print(f"{seconds:9.1f}  {name}")
    print(f"CPU seconds of the {DEAREST} dearest tests")
    for name, seconds in spent["test"].most_common(DEAREST):
        print(f"{seconds:9.1f}  {name}")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(sys.argv[2], sys.argv[3:]))
    show()
