"""Results by the words that name them: a result file, a run folder, or a run by its id."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.jobs.basics.errors import NotFoundError, UsageError
from muster.jobs.runfolder.rundir import find_run, runs_root
from muster.jobs.timing.files import is_timing

if TYPE_CHECKING:
    from muster.collectives_bench.records import Result

SHOW: Final = "muster bench show"


def read(words: Sequence[str], runs: str | None) -> "Result":
    """Read what was measured, all of it as one; without words, the newest run. `runs` is the folder of all runs.

    Raises:
        UsageError: nothing is there under one of the names.
        MusterError: what is there cannot be read.
    """
    from muster.collectives_bench.results.files import read_result

    paths = located(words, runs)
    if timings := [path for path in paths if is_timing(path)]:
        raise UsageError(f"{timings[0]}: is a timing of models, and no measurement of collectives; see it by {SHOW}")
    return read_result(paths)


def located(words: Sequence[str], runs: str | None) -> list[Path]:
    """Return the files and folders that words name; without words, the newest run. Errors as `locate`."""
    return [locate(word, runs) for word in words] or [find_run(runs_root(runs), None).path]


def side(word: str, runs: str | None) -> "Result":
    """Read one side of a comparison: one result, or several with commas between; errors as `read`."""
    return read([word] if Path(word).exists() else word.split(","), runs)


def locate(word: str, runs: str | None) -> Path:
    """Return the file or folder that a word names.

    Raises:
        UsageError: there is none.
    """
    path = Path(word)
    try:
        if path.is_file() or (path.is_dir() and not (path / "events.jsonl").is_file()):
            return path
    except PermissionError as error:
        raise UsageError(f"{word}: cannot be read: {error.strerror}; name a result of yours") from error
    try:
        return find_run(runs_root(runs), word).path
    except NotFoundError as error:
        raise UsageError(f"{word}: no such file, and no run: {error}") from error
