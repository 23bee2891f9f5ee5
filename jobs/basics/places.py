"""Descriptors that define paths inside a folder: a class with a `path` attribute needs one line per path."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Folder(Protocol):
    """An object with a `path` attribute."""

    @property
    def path(self) -> Path:
        """The path of the folder."""
        ...


class At:
    """A path with a fixed name: after `job = At("job.yaml")`, `run.job` is `run.path / "job.yaml"`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Folder, kind: type | None = None) -> Path:
        return folder.path / self.name


class Each:
    """A path with a number or word in its name: after `out = Each("rank-{:05d}.out")`, call `attempt.out(3)`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __get__(self, folder: Folder, kind: type | None = None) -> Callable[[int | str], Path]:
        return lambda which: folder.path / self.pattern.format(which)
