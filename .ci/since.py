"""Choose the test files that reach what has changed since a commit: `since.py REF`.

Prints the test files to standard output, one per line, or the folder `tests` for all of them. Says on standard error
what has changed, and how many test files were selected why.
"""

import ast
import fnmatch
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.imports import PACKAGES  # noqa: E402 - the path above leads to it
from support.reach import all_tests, is_test, marked, product, reach, sources, strings  # noqa: E402

# Whatever these change may change every test.
EVERYTHING = ("muster/", "pyproject.toml", "requirements/", "setup.sh", ".ci/", "tests/conftest.py")
READS_ALL_PYTHON = "tests/test_architecture.py"
SHOWN = 20  # changed files that are named

Choice = dict[str, set[str]]  # the test files by the reason for which they were selected


def changed_since(ref: str, root: Path = ROOT) -> set[str]:
    """Return the paths that differ from a commit: committed since, staged, changed or untracked; deleted ones, too."""
    commands = (
        ["git", "diff", "--name-only", "--no-renames", "-z", ref, "--"],
        ["git", "ls-files", "--others", "--exclude-standard", "-z"],
    )
    texts = [subprocess.run(each, cwd=root, check=True, capture_output=True, text=True).stdout for each in commands]
    return {path for text in texts for path in text.split("\0") if path}


def choose(changed: set[str]) -> Choice:
    """Return the test files that reach changed files, by reason."""
    found: Choice = {}
    for path in sorted(changed):
        for reason, tests in reasons(path).items():
            if tests:
                found.setdefault(reason, set()).update(tests)
    return found


def reasons(path: str) -> Choice:
    """Return the test files that one changed file concerns."""
    tests = set(all_tests())
    if path.startswith(EVERYTHING):
        return {f"{path} may change every test": tests}
    found = {"names a changed file, its folder, or a pattern that fits it": readers_of(path)}
    if path in tests:
        found["has changed itself"] = {path}
    elif path.startswith("tests/") and path.endswith("/conftest.py"):
        folder = path.removesuffix("conftest.py")
        found["is beside or below a changed conftest.py"] = {test for test in tests if test.startswith(folder)}
    elif path in sources():
        found["uses a changed file of tests or benchmarks"] = {test for test in tests if path in reach(test).files}
    elif path.partition("/")[0] in PACKAGES and not path.startswith("jobs/examples/"):
        module = path if path in product() else package_of(path)
        found["imports a changed module"] = {test for test in tests if module in reach(test).modules}
        found["runs the command, whose processes load any module"] = {test for test in tests if marked(test)}
    elif not any(found.values()) and not is_test(path):  # a test that is gone concerns nobody
        found[f"nobody knows what {path} changes"] = tests
    if path.endswith(".py"):
        found["reads all Python files"] = {READS_ALL_PYTHON}
    return found


def package_of(path: str) -> str:
    """Return the `__init__` of the package that holds a file which is no module, or not any more.

    Whoever imported a module that is gone has changed, too, or still asks for it in vain: those import its package.
    """
    return next(init for folder in Path(path).parents if (init := f"{folder}/__init__.py") in product())


@cache
def words() -> dict[str, frozenset[str]]:
    """Return the words of the strings in each file beside the product: paths, names and patterns are among them."""
    return {
        path: frozenset(
            word.strip("\"'`(),:").removeprefix("./").rstrip("/")
            for text in strings(ast.walk(source.tree))
            for word in text.split()
        )
        for path, source in sources().items()
    }


def readers_of(path: str) -> set[str]:
    """Return the test files that name a file in their strings: its path, its name, a folder of it, or a pattern.

    Of a file of Python only its path counts: other files have its name, too, and who names its folder imports it.
    """
    exact, patterns = {path}, False
    if not path.endswith(".py") or path.startswith("jobs/examples/"):
        folders = [folder for folder in Path(path).parents if folder.name]
        exact |= {Path(path).name, *map(str, folders), *(each.name for each in folders if len(each.parts) > 2)}
        patterns = True
    elif path.startswith(("tests/", "benchmarks/")):
        exact |= {Path(path).name}
    naming = {
        file
        for file, found in words().items()
        if found & exact
        or any("/" in word and path.endswith(f"/{word}") for word in found)
        or (patterns and any(fnmatch.fnmatch(path, f"*{word}") for word in found if is_pattern(word)))
    }
    return {test for test in all_tests() if naming & reach(test).files}


def is_pattern(word: str) -> bool:
    """Return whether a word is a pattern of files of one kind."""
    return "*" in word and Path(word).suffix[1:].isalnum()


def report(changed: set[str], chosen: Choice) -> str:
    """Say what has changed and what was selected why."""
    selected = set().union(*chosen.values())
    lines = [f"{len(changed)} files have changed", *(f"  {path}" for path in sorted(changed)[:SHOWN])]
    if len(changed) > SHOWN:
        lines.append(f"  and {len(changed) - SHOWN} more")
    lines.append(f"{len(selected)} of {len(all_tests())} test files are selected")
    lines += [f"{len(tests):5}  {reason}" for reason, tests in sorted(chosen.items(), key=lambda each: -len(each[1]))]
    return "\n".join(lines)


def main(ref: str) -> None:
    """Choose, and print."""
    changed = changed_since(ref)
    chosen = choose(changed)
    print(report(changed, chosen), file=sys.stderr)
    selected = set().union(*chosen.values())
    for each in ["tests"] if selected == set(all_tests()) else sorted(selected):
        print(each)


if __name__ == "__main__":
    main(sys.argv[1])
