"""Descriptors that define the paths in a folder as a table: each path of a class with a `path` is one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Folder(Protocol):
    """An object with a `path`."""

    @property
    def path(self) -> Path:
        """The folder itself."""
        ...


class At:
    """A path with a fixed name: after `job = At("job.yaml")`, `run.job` is `run.path / "job.yaml"`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Folder, kind: type | None = None) -> Path:
        return folder.path / self.name


class Each:
    """Paths that differ in a number or word: after `out = Each("rank-{:05d}.out")`, call `attempt.out(3)`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __get__(self, folder: Folder, kind: type | None = None) -> Callable[[int | str], Path]:
        return lambda which: folder.path / self.pattern.format(which)
