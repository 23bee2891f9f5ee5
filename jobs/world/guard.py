"""The frame of a rank's work: its end, whichever, becomes a report, words on standard error and an exit code."""

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
    """Write the stacks of all threads to standard error on SIGQUIT: whoever supervises a stuck rank asks for them."""
    faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)


def guarded(work: Callable[[Reporter], int]) -> int:
    """Run a rank's work; turn its end into a report, a message on standard error and an exit code."""
    reporter = Reporter(os.environ)
    try:
        ended = work(reporter)
    except MusterError as error:
        reporter.failed(error, peer=isinstance(error, StartTimeoutError))
        complain(f"muster: {error}")
        return error.exit_code
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in DISK_ERRORS  # a print met it before a row did
        reporter.failed(error, peer=is_lost_connection(error))  # a victim must not be taken for the culprit
        complain(traceback.format_exc().rstrip("\n"))
        return exits.STORAGE if full else FAILED
    if dist.is_initialized():  # not after a failure: it may wait for a dead peer, and the process ends without it
        dist.destroy_process_group()
    return ended


@contextmanager
def running_user_code(where: str) -> Iterator[None]:
    """Within it, an exception that passed through a file of the working folder is the user's.

    Raises:
        UserCodeError: in its place; the user's own traceback is printed, and `where` begins the message.
    """
    try:
        yield
    except MusterError:
        raise
    except Exception as error:
        if not code.is_of_user(error, Path.cwd()) or is_lost_connection(error):
            raise
        complain(code.own_traceback(error, Path.cwd()))
        raise code.UserCodeError(f"{where} raised {code.spelt(error)}; its traceback stands above") from error


def measured(reporter: Reporter, bad: str, path: Path) -> int:
    """End a measurement whose records are written: 0, or 1 where something is `bad`, which is said."""
    if not bad:
        return 0
    bad = f"{bad}; the reasons stand in {path.name}"
    complain(f"muster: {bad}")
    reporter.failed(MusterError(bad), peer=False)
    return FAILED


def complain(text: str) -> None:
    """Print on standard error, where that is possible."""
    with suppress(OSError):  # it may lie on the very disk whose being full is to be told; the exit code still is
        print(text, file=sys.stderr, flush=True)


def make_own_folder(path: Path) -> None:
    """Make a folder that a rank writes into: a node without the shared folder keeps its own part.

    Raises:
        RunFolderError, StorageError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(path, error) from error
