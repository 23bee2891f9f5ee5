"""What this machine calls its processor and its GPUs, from files alone; what they do not show stays empty."""

import platform
import re
from pathlib import Path
from typing import Final

from muster.jobs.machine.procfs import text_of

CPU_INFO: Final = Path("/proc/cpuinfo")
NVIDIA: Final = Path("/proc/driver/nvidia/gpus")
# x86 says "model name"; others "cpu model" (MIPS), "cpu" (POWER), "Hardware" or nothing (ARM).
CPU_NAMES: Final = ("model name", "cpu model", "cpu", "Hardware")


def cpu_name() -> str:
    """Return what the processor calls itself, or at least what kind it is."""
    lines = text_of(CPU_INFO).splitlines()
    told = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}
    return next((told[name] for name in CPU_NAMES if told.get(name)), platform.machine())


def driver_gpus() -> list[str]:
    """Name the GPUs that the driver lists, without a word to CUDA."""
    try:
        folders = sorted(NVIDIA.iterdir())
    except OSError:
        return []
    found = (re.search(r"^Model:\s*(.+?)\s*$", text_of(folder / "information"), re.MULTILINE) for folder in folders)
    return [match[1] for match in found if match]
