"""Which files a test file reaches, read from the source: by imports, fixtures, and what strings name.

Of a file beside the product (a test file, conftest.py, tests/support, a benchmark) only the definitions count that are
used, with what they use. A module of the product counts as a whole, with all that it imports.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

from support.imports import REPOSITORY, ancestors, imported, modules

ROOTS = ("tests", "benchmarks")  # the folders whose modules tests import by bare names
NAMED = re.compile(r"\bmuster((?:\.\w+)+)(?: import (\w+))?")  # a module in a string: started, or loaded by its name
SHELL = re.compile(r"-m[ ]muster\b|\bbin[/]muster\b")  # written so that it does not find itself
# The only definition that counts of a file: what else it imports is there to be shared by forks, and is used by none.
ENTRIES = {"tests/rank_server.py": "main"}
ARGVS = {"module_argv", "job_argv"}  # of jobs/basics/boot.py: the words that start a module of Muster's

# The modules that call these. Who imports the first from a test starts a process; the second only write the words.
STARTING = {
    "cloudlab/box/nodes.py",
    "cloudlab/box/control.py",
    "launch/bench/ranks_python.py",
    "launch/node/rank_parent_link.py",
    "launch/scheduler/submitit_run.py",
    "launch/submit/start.py",
    "launch/transports/base.py",
    "launch/transports/local.py",
}
WRITING = {"launch/scheduler/queueing.py", "launch/scheduler/submitit_order.py"}
WRITING |= {"launch/submit/byhand.py", "launch/submit/routes.py"}
# Commands that start processes, called in the process of a test.
VERBS = {"advise", "box", "check", "memory", "predict", "resume", "run", "submit", "sweep", "verify"}


@cache
def product() -> dict[str, frozenset[str]]:
    """Return what each module of the product imports or loads by its name, as paths.

    Imports in functions count, and the packages that Python imports before a module. Imports for type checkers do not:
    they never happen, and mypy sees them.
    """
    edges = {}
    for name, module in modules().items():
        targets = imported(module, functions=True, typing=False)
        paths = {path for target in targets for path in when_imported(target)}
        if not is_package(name):
            paths |= {path for target in loaded(name) for path in with_packages(target)}
        edges[path_of(name)] = frozenset(paths | set(with_packages(name)))
    return edges


def when_imported(name: str) -> set[str]:
    """Return the paths of a module that is imported, and of its packages; and of what it loads, if it is a package."""
    more = loaded(name) if is_package(name) else ()
    return {path for each in (name, *more) for path in with_packages(each)}


@cache
def loaded(name: str) -> frozenset[str]:
    """Return the modules that a module loads by their name, or starts: names in its package, commands, helpers.

    What `launch` starts is not among them: tests of that have the mark `command`.
    """
    tree = modules()[name].tree
    if is_package(name) or name.startswith("launch.commands."):
        return frozenset(names_in(tree))
    if name.startswith("launch."):
        return frozenset()
    return frozenset(each for call in calls(tree, ARGVS) for each in names_in(call))


def calls(tree: ast.AST, names: Iterable[str]) -> Iterator[ast.Call]:
    """Walk through the calls of functions of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def is_package(name: str) -> bool:
    """Return whether a module of the product is the `__init__` of a package."""
    return name in modules() and modules()[name].path.name == "__init__.py"


def path_of(name: str) -> str:
    """Return the path of a module of the product."""
    return str(modules()[name].path.relative_to(REPOSITORY))


def with_packages(name: str) -> list[str]:
    """Return the paths of a module and of the packages that hold it; none for a module that is not ours."""
    return [path_of(each) for each in (*ancestors(name), name) if each in modules()]


def names_in(tree: ast.AST) -> set[str]:
    """Return the modules of the product that strings name."""
    return {each for text in strings(ast.walk(tree)) for each in modules_named(text)}


def modules_named(text: str) -> set[str]:
    """Return the modules of the product that a text names."""
    named = (f"{dotted[1:]}.{member}" if member else dotted[1:] for dotted, member in NAMED.findall(text))
    return {each for name in named for each in longest(name)}


def strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Walk through the strings of a piece of source, without its docstrings; parents come before their children."""
    docstrings = set()
    for node in nodes:
        if isinstance(node, ast.Expr):
            docstrings.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def longest(name: str) -> set[str]:
    """Return the longest beginning of a dotted name that is a module of the product; `session` is a public name."""
    if name.partition(".")[0] in ("", "session"):
        return {"jobs.session.opening"}
    return set([each for each in (*ancestors(name), name) if each in modules()][-1:])


@cache
def module_reach(path: str) -> frozenset[str]:
    """Return all modules of the product that one of them reaches, itself included."""
    found, wanted = set[str](), [path]
    while wanted:
        if (each := wanted.pop()) not in found:
            found.add(each)
            wanted += product()[each]
    return frozenset(found)


@dataclass(frozen=True)
class Import:
    """One imported name: of a module, or a module itself."""

    module: str
    member: str = ""


@dataclass(frozen=True)
class Source:
    """A file of Python beside the product."""

    path: str
    tree: ast.Module

    @cached_property
    def defined(self) -> dict[str, list[ast.stmt]]:
        """The statements at top level that make each name."""
        found: dict[str, list[ast.stmt]] = {}
        for statement in self.tree.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names = {statement.name}
            else:
                names = {
                    node.id
                    for node in ast.walk(statement)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                }
            for name in names:
                found.setdefault(name, []).append(statement)
        return found

    @cached_property
    def bound(self) -> dict[str, set[Import]]:
        """What each name that is imported at top level stands for."""
        found: dict[str, set[Import]] = {}
        for statement in self.tree.body:
            for name, target in imports_of(ast.walk(statement)):
                found.setdefault(name, set()).add(target)
        return found

    @cached_property
    def fixtures(self) -> dict[str, bool]:
        """The fixtures of this file, and whether every test gets them."""
        return {
            name: any("autouse=True" in ast.unparse(each) for each in node.decorator_list)
            for name, nodes in self.defined.items()
            for node in nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_fixture(node)
        }


def is_fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a fixture."""
    return any("fixture" in ast.unparse(each) for each in node.decorator_list)


def asked_for(node: ast.AST) -> list[str]:
    """Return the arguments of a test or fixture, which are fixtures unless it is parametrized; none of another node."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    takes = node.name.startswith("test") or is_fixture(node)
    return [each.arg for each in (*node.args.args, *node.args.kwonlyargs)] if takes else []


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, Import]]:
    """Walk through the imports of a piece of source: the name that each binds, and what it is."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], Import(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, Import(node.module or "", alias.name)


@cache
def sources() -> dict[str, Source]:
    """Parse all Python beside the product, by path: tests and benchmarks."""
    paths = {path for folder in ROOTS for path in (REPOSITORY / folder).rglob("*.py")}
    named = {str(path.relative_to(REPOSITORY)): path for path in sorted(paths)}
    return {name: Source(name, ast.parse(path.read_text(encoding="utf-8"))) for name, path in named.items()}


@cache
def scripts() -> dict[str, frozenset[str]]:
    """Return the paths beside the product by the name of the file."""
    found: dict[str, set[str]] = {}
    for path in sources():
        found.setdefault(Path(path).name, set()).add(path)
    return {name: frozenset(paths) for name, paths in found.items()}


def is_test(path: str) -> bool:
    """Return whether a path is that of a test file."""
    return path.startswith("tests/") and Path(path).name.startswith("test_") and path.endswith(".py")


def all_tests() -> list[str]:
    """Return the paths of all test files."""
    return [path for path in sources() if is_test(path)]


@dataclass(frozen=True)
class Facts:
    """What a piece of source beside the product uses."""

    imports: frozenset[Import]
    modules: frozenset[str]
    scripts: frozenset[str]
    names: frozenset[str]
    arguments: frozenset[str]
    starts: bool


@cache
def facts(path: str, name: str) -> Facts:
    """Return what a definition uses; "" is the whole file."""
    source = sources()[path]
    nodes = [node for tree in (source.defined[name] if name else [source.tree]) for node in ast.walk(tree)]
    texts = set(strings(nodes))
    known = source.defined.keys() | source.bound.keys()
    return Facts(
        frozenset(target for _, target in imports_of(nodes)),
        frozenset(path for text in texts for each in modules_named(text) for path in with_packages(each)),
        frozenset(
            path
            for text in texts
            if not text.startswith(ROOTS)  # a whole path names a file, and does not run it
            if not text.endswith("conftest.py")
            for path in scripts().get(Path(text).name, ())
            if path.endswith(text)
        ),
        frozenset(node.id for node in nodes if isinstance(node, ast.Name) and node.id in known),
        frozenset(each for node in nodes for each in asked_for(node)),
        any(SHELL.search(text) for text in texts) or any(starts(node) for node in nodes),
    )


def starts(node: ast.AST) -> bool:
    """Return whether a node starts a process of Muster's: `-m muster...`, a command, or what ARGVS are for."""
    if isinstance(node, ast.Name):
        return node.id in ARGVS
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value == "muster":
        return ast.unparse(node).endswith("'bin' / 'muster'")
    items = node.elts if isinstance(node, (ast.List, ast.Tuple)) else node.args if isinstance(node, ast.Call) else []
    words = [each.value if isinstance(each, ast.Constant) else None for each in items]
    return any(
        option == "-m" and isinstance(module, str) and module.partition(".")[0] == "muster"
        for option, module in pairwise(words)
    )


def called(tree: ast.AST) -> set[str]:
    """Return the words that calls and lists in a piece of source begin with."""
    found = set()
    for node in ast.walk(tree):
        items = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else []
        if items and isinstance(items[0], ast.Constant) and isinstance(items[0].value, str):
            found.add(items[0].value)
    return found


@dataclass
class Reach:
    """What one test file reaches: files beside the product, modules of the product; and whether it runs the command."""

    test: str
    files: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    starts: bool = False
    seen: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Follow all that is in the test file, and the fixtures that its tests get unasked."""
        self.definition(self.test, "")
        for path in self.conftests:
            self.files.add(path)
            for name, automatic in sources()[path].fixtures.items():
                if automatic and path != "tests/conftest.py":  # there it clears up after all tests
                    self.definition(path, name)
        self.starts = self.starts or bool(self.modules & STARTING)
        if "launch/cli.py" in self.modules:
            words = called(sources()[self.test].tree)
            self.starts = self.starts or bool(words & VERBS)
            every = {
                name.rpartition(".")[2]: path_of(name) for name in modules() if name.startswith("launch.commands.")
            }
            self.modules |= {path for name, path in every.items() if name in words} or set(every.values())
        self.modules = {each for path in self.modules for each in module_reach(path)}

    @cached_property
    def conftests(self) -> list[str]:
        """The conftest.py files that count for the test file, the nearest first."""
        return [path for folder in Path(self.test).parents if (path := f"{folder}/conftest.py") in sources()]

    def definition(self, path: str, name: str) -> None:
        """Follow a name at the top level of a file beside the product; "" follows all that is in it."""
        name = ENTRIES.get(path, name)
        if (path, name) in self.seen or (path, "") in self.seen:
            return
        self.seen.add((path, name))
        self.files.add(path)
        source = sources()[path]
        for target in source.bound.get(name, ()):
            self.target(target)
        if name in source.bound:
            return
        used = facts(path, name if name in source.defined else "")
        for target in used.imports:
            self.target(target)
        self.modules |= used.modules
        self.starts = self.starts or used.starts
        for script in used.scripts:
            self.definition(script, "")
        for each in used.names:
            self.definition(path, each)
        for each in used.arguments:
            for place in [path, *self.conftests]:
                if each in sources()[place].fixtures and (place, each) not in self.seen:
                    self.definition(place, each)
                    break

    def target(self, target: Import) -> None:
        """Follow an import."""
        if target.module.partition(".")[0] == "muster":
            words = [*target.module.split(".")[1:], *([target.member] if target.member else [])]
            self.modules |= {path for each in longest(".".join(words)) for path in when_imported(each)}
            return
        for folder in ROOTS:
            path = f"{folder}/{target.module.replace('.', '/')}"
            if f"{path}/{target.member}.py" in sources():
                self.definition(f"{path}/{target.member}.py", "")
            elif f"{path}.py" in sources():
                self.definition(f"{path}.py", target.member)


@cache
def reach(test: str) -> Reach:
    """Return what a test file reaches."""
    return Reach(test)


def marked(test: str) -> bool:
    """Return whether a test file has the mark `command`."""
    return any("mark.command" in ast.unparse(each) for each in sources()[test].defined.get("pytestmark", ()))
