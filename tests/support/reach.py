"""Which files a test file reaches: a graph of files, read from their source.

The nodes are the modules of the product and the Python files of `tests` and `benchmarks`. A file leads to what it
imports, to the packages around that, and to the modules, scripts and commands that its strings name.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.imports import REPOSITORY, modules, statements

ROOTS = ("tests", "benchmarks")  # the folders whose modules tests import by bare names
ALL_TESTS = "tests/conftest.py"  # concerns all tests, so that no file leads to it
NAMED = re.compile(r"\bmuster\.[\w.]*\w(?: import \w+)?")  # a module in a string: started, or loaded by its name
CALLS = re.compile(r"\blaunch(?:\.| import )cli\b|\b(?:in_process|muster|muster_json)\(")  # commands, in this process
# In the source of a file that starts processes of Muster's: the command, the words that start a module, a command in
# this process that starts others, a box, or a part of the launcher that starts agents and ranks.
STARTS = re.compile(
    r"""-m[ ]muster\b | "-m",\s+"muster | \bbin[/]muster\b | "bin"[ ]/[ ]"muster" | \b(?:module|job)_argv\b
    | \b(?:main|in_process|muster)\(\[?"(?:advise|box|check|memory|predict|resume|run|submit|sweep|verify)"
    | \bbox:[ ]Any\b | \bbox[.]control\b | \btransports[.]local\b | \brank_parent_link\b""",
    re.VERBOSE,
)
# What of tests/support starts them: a module whose users all do, and the names of others.
STARTERS = re.compile(
    r"\bsupport[.](?:box|boxes|transcripts|warm)\b|\b(?:LiveRun|Supervised|start_agent|muster_as|on_terminal|through_pipes)\b"
)


def source(path: str) -> str:
    """Return the text of a file."""
    return (REPOSITORY / path).read_text(encoding="utf-8")


@cache
def files() -> dict[str, ast.Module]:
    """Parse all nodes, by path. `muster/public.py` says where the names are that `muster` itself has."""
    paths = (path for root in ROOTS for path in sorted((REPOSITORY / root).rglob("*.py")))
    beside = ["muster/public.py", *(str(path.relative_to(REPOSITORY)) for path in paths)]
    product = {str(module.path.relative_to(REPOSITORY)): module.tree for module in modules().values()}
    return product | {path: ast.parse(source(path)) for path in beside}


def is_beside(path: str) -> bool:
    """Return whether a path is beside the product, in `tests` or `benchmarks`."""
    return path.startswith(("tests/", "benchmarks/"))


@cache
def all_tests() -> tuple[str, ...]:
    """Return the paths of all test files."""
    return tuple(path for path in files() if path.startswith("tests/") and Path(path).name.startswith("test_"))


@cache
def found(name: str) -> str | None:
    """Return the path of a dotted name: of the longest beginning that is a node. None for what is not ours."""
    parts = name.split(".")
    folders, parts = (("",), parts[1:]) if parts[0] == "muster" else (ROOTS, parts)
    for end in range(len(parts), 0, -1):
        for folder in folders:
            stem = "/".join([*folder.split(), *parts[:end]])
            if f"{stem}.py" in files():
                return f"{stem}.py"
            if f"{stem}/__init__.py" in files():
                return at_first_use(f"{stem}/__init__.py", parts[end:])
    return at_first_use("muster/public.py", parts) if folders == ("",) else None


def at_first_use(path: str, parts: list[str]) -> str | None:
    """Return where a table in this file says that a name is which its package imports at first use; else this file."""
    for node in ast.walk(files()[path]):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and [key.value] == parts[:1]:
                return found(str(value.value))
    return path


def imports(path: str) -> Iterator[str]:
    """Walk through the names that a file imports, but for those that only type checkers import."""
    for node in statements(files()[path], functions=True, typing=False):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def strings(path: str) -> frozenset[str]:
    """Return the strings in a file, without docstrings."""
    nodes = list(ast.walk(files()[path]))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    return frozenset(node.value for node in constants if isinstance(node.value, str))


def named(path: str) -> Iterator[str]:
    """Walk through the dotted names in a file's strings, and those of the commands of `muster` that a test names.

    What `launch` names it starts: tests of that have the mark `command`. Its commands load modules by their names.
    """
    if path.endswith("__init__.py") or (path.startswith("launch/") and not path.startswith("launch/commands/")):
        return
    commands = path in all_tests() and CALLS.search(source(path))
    for text in strings(path):
        # A sentence in the product does not load what it speaks of; a program that a test writes does.
        if is_beside(path) or NAMED.fullmatch(text):
            yield from (each.replace(" import ", ".") for each in NAMED.findall(text))
        if commands and f"launch/commands/{text}.py" in files():
            yield f"muster.launch.commands.{text}"


@cache
def edges(path: str) -> frozenset[str]:
    """Return the files that a file leads to. A string names a script by its name, or by a path in its own folder."""
    targets = {target for name in (*imports(path), *named(path)) if (target := found(name))}
    if is_beside(path):
        scripts = tuple(f"/{text}" for text in strings(path) if text.endswith(".py") and text != "conftest.py")
        targets |= {each for each in files() if is_beside(each) and each.endswith(scripts)}
    around = {f"{folder}/__init__.py" for each in (path, *targets) for folder in Path(each).parents}
    return frozenset((targets | (around & files().keys())) - {ALL_TESTS})


def closure(*start: str) -> frozenset[str]:
    """Return all files that some files lead to, themselves included."""
    reached, wanted = set[str](), [*start]
    while wanted:
        if (each := wanted.pop()) not in reached:
            reached.add(each)
            wanted += edges(each)
    return frozenset(reached)


@cache
def reach(test: str) -> frozenset[str]:
    """Return the files that a test file reaches, also by the conftest.py files around it."""
    around = {f"{folder}/conftest.py" for folder in Path(test).parents} & files().keys()
    return closure(test, *around - {ALL_TESTS})


def leading_to(path: str) -> set[str]:
    """Return the test files that lead to a file; a test file leads to itself."""
    return {test for test in all_tests() if path in reach(test)}


def runs_command(test: str) -> bool:
    """Return whether a test file starts processes of Muster's, itself or by a benchmark."""
    benchmarks = [path for path in closure(test) if path.startswith("benchmarks/")]
    return bool(STARTERS.search(source(test))) or any(STARTS.search(source(path)) for path in (test, *benchmarks))


def marked(test: str) -> bool:
    """Return whether a test file has the mark `command`."""
    return re.search(r"^pytestmark = .*\bmark\.command\b", source(test), re.MULTILINE) is not None
