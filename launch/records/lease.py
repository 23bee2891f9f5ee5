"""The lease of a run, `lease.json`: a heartbeat for readers that see the run folder but not the supervisor's host.

Such a reader cannot see the supervisor's process, and a run without a last row may still be in progress. So the
supervisor renews a small file every RENEW_S, with the time of its own clock. If the time is at most STALE_S ago, the
supervisor is alive; if it is more than DEAD_S ago, the supervisor is gone. In between, the lease alone cannot decide,
because the clocks of the hosts may differ.
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
DEAD_S: Final = 120.0  # clocks differ by at most a minute, because runs refuse other nodes


class Lease:
    """The supervisor's side of the lease. Its file stays open, so that it can be renewed without a free descriptor."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._renewed = -RENEW_S
        self._descriptor = -1

    def renew(self) -> None:
        """Write the lease if RENEW_S seconds have passed. A temporarily full disk is ignored.

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
        """Remove the lease, after the run's last row has been written."""
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
