"""Information from git about a folder: its tracked files, its commit, and the uncommitted changes."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

DEADLINE_S: Final = 60.0
# Other GIT_ variables are removed: inside a git hook they name the hook's repository, not the folder in question.
KEPT: Final = ("GIT_CEILING_DIRECTORIES", "GIT_CONFIG", "GIT_DISCOVERY_ACROSS_FILESYSTEM")
# Settings of the folder's repository that would run programs. Filters (`filter.NAME.clean`) still run in a diff.
HARMLESS: Final = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "diff.ignoreSubmodules=dirty")
DIFF_BYTES: Final = 1 << 20
FAILED: Final = 128  # git's exit code for its own errors: no repository, an untrusted one, a damaged one
REASON_CHARACTERS: Final = 200


class GitError(Exception):
    """git is not installed, or it failed for the given reason."""


def git(folder: Path, *arguments: str, deadline_s: float = DEADLINE_S) -> bytes:
    """Run a git command in a folder; return its output.

    Raises:
        GitError: if git is not installed, fails, or takes too long.
    """
    argv = ["git", *(word for setting in HARMLESS for word in ("-c", setting)), *arguments]
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline_s,
        )
    except FileNotFoundError as error:
        raise GitError("git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git {arguments[0]} took longer than {deadline_s:g} s") from error
    except OSError as error:
        raise GitError(f"git cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise GitError(said[:REASON_CHARACTERS] or f"git {arguments[0]} ended with code {done.returncode}")
    return done.stdout


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which git commands change nothing and never prompt."""
    kept = {name: value for name, value in environ.items() if not name.startswith("GIT_") or name.startswith(KEPT)}
    fixed = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
    return {**kept, "LC_ALL": "C", **fixed}


def names(folder: Path, *options: str) -> list[str]:
    """List the paths that `git ls-files` prints for a folder, without duplicates. The path of a folder ends in a slash.

    Raises:
        GitError: as for `git`.
    """
    said = git(folder, "ls-files", "-z", "--exclude-standard", *options)
    return list(dict.fromkeys(os.fsdecode(name) for name in said.split(b"\0") if name))


def holds(folder: Path) -> bool:
    """Return whether a folder is in a git work tree and is not ignored there.

    Raises:
        GitError: if git is installed but cannot answer, for example about another user's repository.
    """
    try:
        if git(folder, "rev-parse", "--is-inside-work-tree").strip() != b"true":
            return False
    except GitError as error:
        if "not a git repository" in str(error) or "not installed" in str(error):
            return False
        raise
    try:
        git(folder, "check-ignore", "-q", ".")
    except GitError:
        return True  # exit code 1: not ignored
    return False


def origin(folder: Path) -> dict[str, Any] | None:
    """Return the commit, branch and diff of a folder in a work tree; None before the first commit.

    `cut` is true if the diff was longer than DIFF_BYTES and has been truncated.

    Raises:
        GitError: as for `git`.
    """
    try:
        commit = git(folder, "rev-parse", "--verify", "-q", "HEAD").decode().strip()
    except GitError:
        return None
    try:
        branch = os.fsdecode(git(folder, "symbolic-ref", "--short", "-q", "HEAD").strip())
    except GitError:
        branch = None  # detached HEAD
    diff = git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".")
    text = diff[:DIFF_BYTES].decode(errors="surrogateescape")
    return {"commit": commit, "branch": branch, "diff": text, "cut": len(diff) > DIFF_BYTES}


def short_commit(folder: Path, file: str, *, deadline_s: float) -> str:
    """Return the commit of the work tree that tracks `file` in a folder, with a `+` if there are uncommitted changes.

    Raises:
        GitError: as for `git`; also if the file is outside any work tree, or not tracked.
    """
    git(folder, "ls-files", "--error-unmatch", "--", file, deadline_s=deadline_s)
    return git(folder, "describe", "--always", "--dirty=+", "--exclude=*", deadline_s=deadline_s).decode().strip()
