"""The marks that tests of a file may have, read from its text, so that `pytest -m` imports only the files it needs.

Importing all files takes pytest longer than most of its tests. `.ci/run` starts it four times.
"""

import re
from functools import cache
from itertools import combinations
from pathlib import Path

CHOSEN = ("slow", "gpu", "cluster", "soak", "unsteady")
NEEDS_PACKAGES = {"sshd", "without_a_cluster"}  # fixtures that start what a bare machine has not: sshd, pdsh, Slurm
# Words of a file, and the marks that tests/conftest.py and support/soak.py add for them.
ADDED = {**dict.fromkeys(NEEDS_PACKAGES, "cluster"), "only_some": "soak"}
MARK = re.compile(rf"\bmark\.({'|'.join(CHOSEN)})\b")
OF_ALL = re.compile(r"^pytestmark = (\[[^\]]*\]|[^\n]*)", re.MULTILINE)


def with_slow(marks: frozenset[str]) -> frozenset[str]:
    """Add what gpu, cluster and soak imply."""
    return marks | {"slow"} if marks & {"gpu", "cluster", "soak"} else marks


@cache
def marks_of(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the marks that all tests of a file have, and those that some may have besides."""
    text = path.read_text(encoding="utf-8")
    of_all = with_slow(frozenset(mark for found in OF_ALL.findall(text) for mark in MARK.findall(found)))
    words = frozenset(mark for word, mark in ADDED.items() if word in text)
    return of_all, (words | frozenset(MARK.findall(text))) - of_all


@cache
def chooses_any(expression: str, of_all: frozenset[str], of_some: frozenset[str]) -> bool:
    """Return whether `-m expression` may choose a test with these marks; one of other marks may always do so."""
    try:
        return any(
            eval(expression, {"__builtins__": {}}, {mark: mark in marks for mark in CHOSEN})
            for marks in combined(of_all, of_some)
        )
    except (NameError, SyntaxError, TypeError):
        return True


@cache
def combined(of_all: frozenset[str], of_some: frozenset[str]) -> frozenset[frozenset[str]]:
    """Return every set of marks that a test may have."""
    some = (more for count in range(len(of_some) + 1) for more in combinations(of_some, count))
    return frozenset(with_slow(of_all | set(more)) for more in some)
