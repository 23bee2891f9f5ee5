"""Run a rank's work, and convert its end or failure to a report, a message on standard error, and an exit code."""

import errno
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch.distributed as dist

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, StartTimeoutError
from muster.jobs.basics.files import folder_error
from muster.jobs.node.reports import Reporter
from muster.jobs.user import code
from muster.jobs.world.failures import is_lost_connection

FAILED: Final = 1
STANDARD_ERROR: Final = 2
DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def show_stacks() -> None:
    """Write the stacks of all threads to standard error on SIGQUIT, so that a supervisor can inspect a stuck rank."""
    faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)


def guarded(work: Callable[[Reporter], int]) -> int:
    """Run a rank's work; convert its end to a report, a message on standard error and an exit code."""
    reporter = Reporter(os.environ)
    try:
        ended = work(reporter)
    except MusterError as error:
        reporter.failed(error, peer=isinstance(error, StartTimeoutError))
        complain(f"muster: {error}")
        return error.exit_code
    except Exception as error:
        # a full disk can fail a print before it fails the write of a metrics row
        full = isinstance(error, OSError) and error.errno in DISK_ERRORS
        reporter.failed(error, peer=is_lost_connection(error))  # a rank that lost its peer is not the cause
        complain(traceback.format_exc().rstrip("\n"))
        return exits.STORAGE if full else FAILED
    if dist.is_initialized():  # only after success, because after a failure this could wait for a dead peer
        dist.destroy_process_group()
    return ended


@contextmanager
def running_user_code(where: str) -> Iterator[None]:
    """Attribute exceptions to the user if they passed through a file of the working folder.

    Raises:
        UserCodeError: in place of such an exception, after printing the user's own traceback. The message begins with
            `where`.
    """
    try:
        yield
    except MusterError:
        raise
    except Exception as error:
        if not code.is_of_user(error, Path.cwd()) or is_lost_connection(error):
            raise
        complain(code.own_traceback(error, Path.cwd()))
        raise code.UserCodeError(f"{where} raised {code.spelt(error)}; see the traceback above") from error


def measured(reporter: Reporter, bad: str, path: Path) -> int:
    """Return the exit code of a measurement after its records are written: 0, or 1 after reporting the text `bad`."""
    if not bad:
        return 0
    bad = f"{bad}; see {path.name} for the reasons"
    complain(f"muster: {bad}")
    reporter.failed(MusterError(bad), peer=False)
    return FAILED


def complain(text: str) -> None:
    """Print on standard error if possible."""
    with suppress(OSError):  # standard error may be on a full disk; the exit code still reports the failure
        print(text, file=sys.stderr, flush=True)


def make_own_folder(path: Path) -> None:
    """Create a folder that a rank writes into. On a node without the shared run folder, the folder is local.

    Raises:
        RunFolderError, StorageError: if it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(path, error) from error
