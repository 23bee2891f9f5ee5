"""Cap the logs of ranks: keep the first and the last part of each, and free the disk space of the middle.

    | first 64 MB, ending with a line that states how much is left out | hole | last 192 MB |

Ranks keep appending to the same file, so they never wait, new output is not lost, and offsets stay valid. `cat` shows
the hole as zero bytes; `launch/common/follow.py` skips it.
"""

import os
import stat
from pathlib import Path
from typing import Final

from muster.jobs.basics.ownership import warn_once
from muster.jobs.machine.linux import PUNCH_HOLE, fallocate

FIRST_BYTES: Final = 64 << 20
LAST_BYTES: Final = 192 << 20
STEP_BYTES: Final = 16 << 20
BLOCK_BYTES: Final = 64 << 10  # at least the size of any page or disk block
SECTOR_BYTES: Final = 512  # the unit of st_blocks


def cap(path: Path, *, first: int = FIRST_BYTES, last: int = LAST_BYTES, step: int = STEP_BYTES) -> None:
    """Free the middle of a log that takes at least `first + last + step` bytes on disk (all are whole blocks)."""
    try:
        status = path.lstat()
        end = (status.st_size - last) // BLOCK_BYTES * BLOCK_BYTES
        if status.st_blocks * SECTOR_BYTES < first + last + step or end <= first or not stat.S_ISREG(status.st_mode):
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            fallocate(descriptor, first, end - first, PUNCH_HOLE)
            line = f"\n[muster: {end - first:>16,} bytes of this log are left out here]\n".encode()
            os.pwrite(descriptor, line, first - len(line))
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return
    except OSError as error:
        warn_once(
            f"{path.parent}: logs here cannot be capped, and may fill the disk: {error.strerror}", str(path.parent)
        )
