"""Results by the words that name them: a result file, a run folder, or a run by its id."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import RunFolderError, UsageError
from jobs.rundir import find_run, runs_root

if TYPE_CHECKING:
    from collectives_bench.records import Result


def read(words: Sequence[str], runs: str | None) -> "Result":
    """Read what was measured, all of it as one; without words, the newest run. `runs` is the folder of all runs.

    Raises:
        UsageError: nothing is there under one of the names.
        MusterError: what is there cannot be read.
    """
    from collectives_bench.results.files import read_result

    newest = [] if words else [find_run(runs_root(runs), None).path]
    return read_result([locate(word, runs) for word in words] or newest)


def side(word: str, runs: str | None) -> "Result":
    """Read one side of a comparison: one result, or several with commas between; errors as `read`."""
    return read([word] if Path(word).exists() else word.split(","), runs)


def locate(word: str, runs: str | None) -> Path:
    """Return the file or folder that a word names.

    Raises:
        UsageError: there is none.
    """
    path = Path(word)
    if path.is_file() or (path.is_dir() and not (path / "events.jsonl").is_file()):
        return path
    try:
        return find_run(runs_root(runs), word).path
    except RunFolderError as error:
        raise UsageError(f"{word}: no such file, and no run: {error}") from error
