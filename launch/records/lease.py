"""A run's sign of life, `lease.json`, for readers that see the run folder but not the supervisor's host.

A process cannot be seen from another machine, and a missing last row may mean that the run is still in progress. So the
supervisor renews a small file every two seconds. If the file has not been renewed for half a minute, the supervisor is
considered gone. Times are by the writer's clock; half a minute allows for a reader's clock that is a few seconds off.
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
DEAD_S: Final = 120.0  # more than a minute: runs refuse nodes whose clocks are off by that much


class Lease:
    """The supervisor's side. Its file stays open, so that a process without free descriptors can still renew it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._renewed = -RENEW_S
        self._descriptor = -1

    def renew(self) -> None:
        """Write the lease if RENEW_S have passed. A temporarily full disk is ignored.

        Raises:
            RunFolderError: if it cannot be written.
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
            # Fixed length and a single write, so that a reader sees either the old or the new content.
            os.pwrite(self._descriptor, json.dumps(record).ljust(LEASE_BYTES).encode(), 0)
        except OSError as error:
            failed = folder_error(self.run.lease, error)
            if not isinstance(failed, StorageError):
                raise failed from error

    def give_up(self) -> None:
        """Remove the lease after the run's last row."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.run.lease.unlink(missing_ok=True)


def age_s(run: RunDir) -> float | None:
    """Return the age of a run's lease in seconds; None if there is no readable lease."""
    try:
        return time.time() - float(read_json(run.lease)["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
