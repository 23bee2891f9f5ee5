"""Read the names of the processor and the GPUs from files, without initializing CUDA."""

import platform
import re
from pathlib import Path
from typing import Final

from muster.jobs.machine.procfs import text_of

CPU_INFO: Final = Path("/proc/cpuinfo")
NVIDIA: Final = Path("/proc/driver/nvidia/gpus")
# x86 has "model name"; others have "cpu model" (MIPS), "cpu" (POWER), "Hardware" or nothing (ARM).
CPU_NAMES: Final = ("model name", "cpu model", "cpu", "Hardware")


def cpu_name() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    lines = text_of(CPU_INFO).splitlines()
    fields = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}
    return next((fields[name] for name in CPU_NAMES if fields.get(name)), platform.machine())


def driver_gpus() -> list[str]:
    """Return the names of the GPUs that the driver lists, without initializing CUDA."""
    try:
        folders = sorted(NVIDIA.iterdir())
    except OSError:
        return []
    found = (re.search(r"^Model:\s*(.+?)\s*$", text_of(folder / "information"), re.MULTILINE) for folder in folders)
    return [match[1] for match in found if match]
