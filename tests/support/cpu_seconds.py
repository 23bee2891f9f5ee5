"""How much CPU time a test uses, with the processes that it starts and those that it finds running."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def spent() -> float:
    """Return the CPU seconds of this process, of its ended children and of all living descendants."""
    return sum(os.times()[:4]) + sum(_of(child) for child in _children(os.getpid()))


def _of(pid: int) -> float:
    """Return the CPU seconds of a process, its ended children and its living descendants; 0 if it ends meanwhile."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(int(field) for field in fields[11:15]) / TICKS  # utime, stime, cutime, cstime: see proc(5)
    return own + sum(_of(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [int(child) for thread in threads for child in _text(thread / "children").split()]


def _text(file: Path) -> str:
    """Return what a file of a thread has; nothing if the thread has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""
