"""A run's sign of life, `lease.json`: for those who see the run folder, but not the host of its supervisor.

A process cannot be seen from another machine, and a missing last row may mean that it still runs. So the supervisor
renews a small file every two seconds; one that was not renewed for half a minute has no supervisor any more.
Times are the writer's; the reader's clock may differ by a few seconds, which half a minute forgives.
"""

import json
import os
import socket
import time
from typing import Final

from muster.jobs.basics.errors import StorageError
from muster.jobs.basics.files import folder_error, mode_in
from muster.jobs.basics.reading import read_json
from muster.jobs.runfolder.rundir import RunDir

RENEW_S: Final = 2.0
LEASE_BYTES: Final = 256
STALE_S: Final = 30.0
DEAD_S: Final = 120.0  # runs refuse nodes whose clock is off by a minute


class Lease:
    """The supervisor's end. It keeps its file open: a process that is out of descriptors still shows that it lives."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._renewed = -RENEW_S
        self._descriptor = -1

    def renew(self) -> None:
        """Write the lease, if the last one is old enough; a disk that is full for a while does not end a run.

        Raises:
            RunFolderError: it cannot be written.
        """
        now = time.monotonic()
        if now - self._renewed < RENEW_S:
            return
        self._renewed = now
        record = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        try:
            if self._descriptor < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(self.run.lease, flags, 0o600)
                os.fchmod(self._descriptor, mode_in(self.run.path))
            # Always as long, and one write: a reader sees the old one or the new one.
            os.pwrite(self._descriptor, json.dumps(record).ljust(LEASE_BYTES).encode(), 0)
        except OSError as error:
            failed = folder_error(self.run.lease, error)
            if not isinstance(failed, StorageError):
                raise failed from error

    def give_up(self) -> None:
        """Take the lease away: the run has its last row."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.run.lease.unlink(missing_ok=True)


def age_s(run: RunDir) -> float | None:
    """Return how old a run's lease is, in seconds; None where there is none that can be read."""
    try:
        return time.time() - float(read_json(run.lease)["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
