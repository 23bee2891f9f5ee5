"""Exit codes and the errors that carry them, compared with DESIGN's table."""

import pytest

from muster.jobs.basics import errors
from muster.jobs.basics.exits import TABLE, class_of
from muster.jobs.basics.reading import UntrustedError


def test_the_table_is_the_documented_one() -> None:
    assert [row.code for row in TABLE] == [0, 2, 65, 66, 69, 72, 73, 74, 75, 76, 77, 78, 93, 124, 130]


def test_codes_and_classes_name_each_other() -> None:
    assert len({row.code for row in TABLE}) == len({row.name for row in TABLE}) == len(TABLE)
    assert [class_of(row.code) for row in TABLE] == [row.name for row in TABLE]


@pytest.mark.parametrize(
    ("code", "name"),
    [(137, "signal"), (143, "signal"), (129, "signal"), (128, "failed"), (193, "failed"), (1, "failed")],
)
def test_other_codes_are_signals_or_failures_of_the_job(code: int, name: str) -> None:
    assert class_of(code) == name


CODES = {
    errors.UsageError: 2,
    errors.JobFileError: 65,
    errors.UnreachableError: 69,
    errors.RunFolderError: 73,
    errors.NotFoundError: 72,
    UntrustedError: 77,
    errors.StorageError: 74,
    errors.RefusedError: 78,
    errors.StartTimeoutError: 124,
    errors.StoppedError: 130,
}


def test_every_error_carries_its_documented_code() -> None:
    assert {error: error("why").exit_code for error in CODES} == CODES
    assert {class_of(code) for code in CODES.values()} <= {row.name for row in TABLE}
    ours = [error for error in errors.MusterError.__subclasses__() if error.__module__ == errors.__name__]
    assert all(error.exit_code != errors.MusterError.exit_code for error in ours)
