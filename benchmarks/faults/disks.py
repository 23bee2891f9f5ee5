"""Disks that fill up, freeze, turn read-only and fail: a tmpfs, or an ext4 of its own in a file on a loop device.

ext4's shutdown (an ioctl made for tests) drops everything that was not made durable and answers EIO from then on: a
disk that dies, and, mounted again, a machine that lost its power.
"""

import fcntl
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from faults.live import wait_for

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)
WITHOUT_FLUSH = (2).to_bytes(4, "little")  # EXT4_GOING_FLAGS_NOLOGFLUSH
FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE, FITHAW of linux/fs.h
MB = 1 << 20


class Disk:
    """A file system of its own at `point`; a context manager, so that nothing stays mounted."""

    def __init__(self, point: Path, *, size_mb: int, image: Path | None = None) -> None:
        self.point = point
        self.size_mb = size_mb
        self.image = image  # an ext4 in this file; without one, a tmpfs
        self.filler = point / "somebody-elses-file"
        self._frozen = False

    def __enter__(self) -> "Disk":
        self.point.mkdir(parents=True, exist_ok=True)
        if self.image is not None:
            with self.image.open("wb") as file:
                file.truncate(self.size_mb * MB)
            call("mkfs.ext4", "-q", "-O", "has_journal", "-m", "0", str(self.image))
        self.mount()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thaw()
        call("umount", "--lazy", str(self.point), check=False)

    def mount(self) -> None:
        """Mount it; an ext4 reads its journal, as after a crash."""
        if self.image is None:
            call("mount", "-t", "tmpfs", "-o", f"size={self.size_mb}m", "none", str(self.point))
        else:
            call("mount", "-o", "loop", str(self.image), str(self.point))

    def remount(self) -> None:
        """Unmount it as soon as nobody holds it, and mount it again."""
        _when_free("umount", str(self.point))
        self.mount()

    def fill(self, *, leave_bytes: int) -> Path:
        """Let a file grow until so much is left; return it."""
        with self.filler.open("ab") as file:
            room = shutil.disk_usage(self.point).free - leave_bytes
            if room > 0:
                with suppress(OSError):  # somebody else was faster
                    os.posix_fallocate(file.fileno(), file.tell(), room)
        return self.filler

    def make_readonly(self) -> None:
        """Remount it read-only, as ext4 does by itself after an error; waits for a moment without open writers."""
        _when_free("mount", "-o", "remount,ro", str(self.point))

    def make_writable(self) -> None:
        """Remount it as it was."""
        call("mount", "-o", "remount,rw", str(self.point))

    def freeze(self) -> None:
        """Let every write wait, in state D, until `thaw`."""
        self._ioctl(FREEZE, (0).to_bytes(4, "little"))
        self._frozen = True

    def thaw(self) -> None:
        """Let writes go on."""
        if self._frozen:
            self._ioctl(THAW, (0).to_bytes(4, "little"))
            self._frozen = False

    def die(self) -> None:
        """Drop what is not durable; from now on every access fails with EIO."""
        self._ioctl(SHUTDOWN, WITHOUT_FLUSH)

    def _ioctl(self, number: int, argument: bytes) -> None:
        descriptor = os.open(self.point, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, number, argument)
        finally:
            os.close(descriptor)


def _when_free(*argv: str) -> None:
    """Run a tool of the system's until it succeeds."""
    wait_for(argv[0], lambda: subprocess.run(argv, capture_output=True, check=False).returncode == 0, 20.0)


def call(*argv: str, check: bool = True) -> None:
    """Run a tool of the system's."""
    subprocess.run(argv, capture_output=True, check=check, timeout=60)
