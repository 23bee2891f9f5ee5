"""Paths in a folder as a table: a class that has a `path` names each of them in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Folder(Protocol):
    """What has paths below its own."""

    @property
    def path(self) -> Path:
        """The folder itself."""
        ...


class At:
    """A path by its name in the folder: after `job = At("job.yaml")`, `run.job` is `run.path / "job.yaml"`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Folder, kind: type | None = None) -> Path:
        return folder.path / self.name


class Each:
    """Paths that a number or a word tells apart: after `out = Each("rank-{:05d}.out")`, `attempt.out(3)` is one."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __get__(self, folder: Folder, kind: type | None = None) -> Callable[[int | str], Path]:
        return lambda which: folder.path / self.pattern.format(which)
