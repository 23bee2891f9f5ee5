"""Choose the test files that reach what has changed since a commit: `since.py REF`.

Prints the test files to standard output, one per line, or the folder `tests` for all of them. Says on standard error
what has changed, and how many test files were selected why.
"""

import fnmatch
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.imports import PACKAGES  # noqa: E402 - the path above leads to it
from support.reach import ALL_TESTS, all_tests, closure, files, is_beside, leading_to, marked, strings  # noqa: E402

# Whatever these change may change every test; so may what tests/conftest.py leads to.
EVERYTHING = ("muster/", "pyproject.toml", "requirements/", "setup.sh", ".ci/", ALL_TESTS)
READS_ALL_PYTHON = "tests/test_architecture.py"

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
    if path.startswith(EVERYTHING) or (is_beside(path) and path in closure(ALL_TESTS)):
        return {f"{path} may change every test": tests}
    in_product = path.partition("/")[0] in PACKAGES and not path.startswith("jobs/examples/")
    found = {
        "leads to a changed file": leading_to(package_of(path) if in_product and path not in files() else path),
        "names a changed file, its folder, or a pattern that fits it": readers_of(path),
    }
    if in_product:
        found["runs the command, whose processes load any module"] = {test for test in tests if marked(test)}
    elif path not in files() and not any(found.values()) and not Path(path).match("test_*.py"):  # gone: of no concern
        found[f"nobody knows what {path} changes"] = tests
    if path.endswith(".py"):
        found["reads all Python files"] = {READS_ALL_PYTHON}
    return found


def package_of(path: str) -> str:
    """Return the `__init__` of the package around a file that is no module, or not any more.

    Whoever still asks for it imports that.
    """
    return next(init for folder in Path(path).parents if (init := f"{folder}/__init__.py") in files())


def readers_of(path: str) -> set[str]:
    """Return the test files that name a file in their strings: its path, its name, a folder of it, or a pattern.

    Of a file of Python only its path counts: other files have its name, too, and who names its folder imports it.
    """
    name, folders = Path(path).name, list(Path(path).parents)[:-1]
    only_path = path.endswith(".py") and not path.startswith("jobs/examples/")

    def says(text: str) -> bool:
        if only_path or path in text:
            return path in text
        if "*" in text:
            return Path(text).suffix[1:].isalnum() and fnmatch.fnmatch(path, f"*{text}")
        folder = text.rstrip("/")
        return name in text or any(
            str(each) == folder or (len(each.parts) > 2 and str(each).endswith(f"/{folder}")) for each in folders
        )

    naming = {file for file in files() if is_beside(file) and any(says(text) for text in strings(file))}
    return set().union(*map(leading_to, naming))


def report(changed: set[str], chosen: Choice) -> str:
    """Say what has changed and what was selected why."""
    selected = set().union(*chosen.values())
    lines = [f"{len(changed)} files have changed", *(f"  {path}" for path in sorted(changed))]
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
