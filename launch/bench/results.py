"""Functions that find and read results: result files, run folders, and runs named by their ids."""

from collections.abc import Sequence
from pathlib import Path

from muster.jobs.basics.errors import NotFoundError, UsageError
from muster.jobs.runfolder.rundir import find_run, runs_root
from muster.jobs.timing.files import is_timing, read_timings
from muster.launch.bench.report import BenchReport, of_collectives, of_models


def read(words: Sequence[str], runs: str | None) -> BenchReport:
    """Read results and join them into one report. Without words, read the newest run in the folder `runs`.

    Raises:
        UsageError: if a name matches nothing, or some results are of collectives and some of models.
        MusterError: if a result cannot be read.
    """
    return of_paths([locate(word, runs) for word in words] or [find_run(runs_root(runs), None).path])


def of_paths(paths: Sequence[Path], unmeasured: Sequence[str] = ()) -> BenchReport:
    """Read files and run folders; `unmeasured` as for `of_collectives`, errors as for `read`."""
    from muster.collectives_bench.results.files import read_result

    timings = [path for path in paths if is_timing(path)]
    if timings and len(timings) < len(paths):
        other = next(path for path in paths if path not in timings)
        raise UsageError(f"{timings[0]}: is a timing of models, but {other} is not; name results of one kind")
    return of_models(read_timings(paths)) if timings else of_collectives(read_result(paths), unmeasured)


def locate(word: str, runs: str | None) -> Path:
    """Return the file or folder that a word names.

    Raises:
        UsageError: if the word names no readable file, folder or run.
    """
    path = Path(word)
    try:
        if path.is_file() or (path.is_dir() and not (path / "events.jsonl").is_file()):
            return path
    except PermissionError as error:
        raise UsageError(f"{word}: cannot be read: {error.strerror}; name a result that you own") from error
    try:
        return find_run(runs_root(runs), word).path
    except NotFoundError as error:
        raise UsageError(f"{word}: no such file, and no run: {error}") from error
