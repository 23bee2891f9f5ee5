"""Exceptions for errors that a user can act on, each with an exit code. Bugs in Muster fail an `assert` instead.

A message is one line. It names the place, the value found, the value expected, and what to do. The command line prints
messages without a traceback.
"""

from muster.jobs.basics import exits


class MusterError(Exception):
    """Base class of these errors. Muster raises only subclasses."""

    exit_code: int = 1


class UsageError(MusterError):
    """The command line is wrong."""

    exit_code = exits.USAGE


class JobFileError(MusterError):
    """The job file or the site file is wrong. The message may have several lines, one per mistake."""

    exit_code = exits.BAD_JOB


class UnreachableError(MusterError):
    """A node cannot be reached, or its agent is gone."""

    exit_code = exits.UNREACHABLE


class RunFolderError(MusterError):
    """The run folder cannot be created, read or written."""

    exit_code = exits.RUN_FOLDER


class NotFoundError(RunFolderError):
    """The named run does not exist, or lacks the requested record."""

    exit_code = exits.NOT_FOUND


class StorageError(MusterError):
    """A disk is full or failing."""

    exit_code = exits.STORAGE


class RefusedError(MusterError):
    """Job, hosts, data and machine are valid separately, but do not fit together."""

    exit_code = exits.REFUSED


class StartTimeoutError(MusterError):
    """A node or a rank did not join before the start timeout."""

    exit_code = exits.TIMEOUT


class NoCheckpointError(MusterError):
    """There is no usable checkpoint."""

    exit_code = exits.NO_CHECKPOINT


class BadCheckpointError(NoCheckpointError):
    """A checkpoint is incomplete or damaged, or Muster did not write it. Such a checkpoint is not used."""


class StoppedError(MusterError):
    """The user stopped the run."""

    exit_code = exits.STOPPED
