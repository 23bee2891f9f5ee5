"""The disk space of a run folder."""

import os
from contextlib import suppress
from pathlib import Path


def folder_bytes(folder: Path) -> int:
    """Add up the sizes of all files below a folder, in bytes. Links are not followed.

    A file with several names (hard links) counts in equal shares for each name, so the sizes of all runs add up to
    the space that they use. Files that cannot be examined, or are deleted meanwhile, are ignored.
    """
    total, pending = 0.0, [os.fspath(folder)]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        status = entry.stat(follow_symlinks=False)
                        total += status.st_size / status.st_nlink
    return round(total)
