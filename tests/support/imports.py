"""The import graph: which module imports which, read from their source."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = sorted(init.parent.name for init in REPOSITORY.glob("*/__init__.py") if init.parent.name != "muster")
OURS = "muster."  # before the name of every package, wherever it is imported


@dataclass(frozen=True)
class Module:
    """One file, by its dotted name."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The top-level folder."""
        return self.name.partition(".")[0]


@cache
def modules() -> dict[str, Module]:
    """Parse every module of every package, by dotted name; examples are programs of the user's."""
    found = {}
    for package in PACKAGES:
        for path in sorted({*(REPOSITORY / package).rglob("*.py")} - {*(REPOSITORY / "jobs/examples").rglob("*.py")}):
            name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return found


@cache
def imported(module: Module, *, functions: bool, typing: bool) -> frozenset[str]:
    """Name what a module imports: our modules from their package on, others as written.

    `functions` adds imports inside functions, `typing` those under `if TYPE_CHECKING`.
    """
    names: set[str] = set()
    for node in statements(module.tree, functions=functions, typing=typing):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix(OURS) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module_name = f"{node.module}.".removeprefix(OURS)
            full = {module_name + alias.name for alias in node.names}
            names |= {name if name in modules() else module_name.rstrip(".") or name for name in full}
    return frozenset(names)


def statements(node: ast.AST, *, functions: bool, typing: bool) -> Iterator[ast.AST]:
    """Walk a tree but for its expressions, leaving out function bodies and type-checking blocks on request."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) or (
            isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not functions
        ):
            continue
        if not typing and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child, functions=functions, typing=typing)


def ancestors(name: str) -> list[str]:
    """List the packages that Python imports before a module."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def root(name: str) -> str:
    """Return the first part of a dotted name."""
    return name.partition(".")[0]
