"""Make glibc keep freed memory for the next step instead of returning it to the kernel.

By default, glibc uses mmap for each large block, and returns free memory at the top of its heap to the kernel. So in
every step the kernel must zero every page again. A step of VGG-11 with 8 images has 9,000 page faults by default, and
40 with these settings, which make it 15 % shorter.
"""

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1  # malloc.h
M_MMAP_THRESHOLD: Final = -3
LARGEST_IN_HEAP_BYTES: Final = 2**25  # glibc's maximum
KEPT_BYTES: Final = 2**28


def keep_freed_memory() -> None:
    """Keep up to 256 MB of memory that this process frees on the CPU. Do nothing if the C library lacks `mallopt`."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
