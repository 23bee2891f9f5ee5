"""Working folders for tests: files of any name, and git repositories."""

import os
import subprocess
from pathlib import Path

AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")


def write(folder: Path, *names: str | bytes, text: str = "x") -> None:
    """Write the same text into files below a folder, whose names may be any bytes."""
    for name in names:
        path = Path(os.fsdecode(os.fsencode(folder) + b"/" + os.fsencode(name)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(folder: Path, *arguments: str) -> str:
    """Run a git command in a folder; return what it prints."""
    argv = ["git", *AUTHOR, *arguments]
    return subprocess.run(argv, cwd=folder, check=True, capture_output=True, text=True).stdout


def repository(folder: Path, ignore: str = "") -> None:
    """Make a folder a git repository, with nothing in it but what it ignores."""
    git(folder, "init", "-q", "-b", "main")
    write(folder, ".gitignore", text=ignore)


def commit(folder: Path) -> str:
    """Commit all there is; return the commit."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD").strip()
