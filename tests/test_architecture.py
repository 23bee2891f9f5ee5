"""DESIGN.md's import table, held against the code; and the habits that no reviewer's memory holds for long."""

import ast
import graphlib
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from support.imports import PACKAGES, REPOSITORY, Module, ancestors, imported, modules, root

pytestmark = pytest.mark.slow

FILE_LINES = 500  # one thought may need that many; the median is what matters
MEDIAN_LINES = 130
FUNCTION_LINES = 60  # DESIGN aims at 40

# What a row of DESIGN may ask of PyPI: the dependencies that pyproject.toml gives reasons for, by import name.
LIBRARIES = {
    "jinja2",
    "markupsafe",
    "matplotlib",
    "msgspec",
    "numpy",
    "pydantic",
    "pydantic_core",
    "yaml",
    "rich",
    "submitit",
}
LIBRARIES |= {"typing_extensions"}


@dataclass(frozen=True)
class Row:
    """One row of DESIGN's table: the paths it speaks of, and what modules there may import."""

    paths: tuple[str, ...]
    torch: bool
    whole: frozenset[str]
    torch_free: frozenset[str]


@cache
def needs_torch() -> frozenset[str]:
    """Name the modules that import torch at any level, or import such a module, or live in a package that does."""
    edges = {}
    for name, module in modules().items():
        direct = imported(module, functions=True, typing=False)
        parents = {parent for each in direct for parent in ancestors(each)}
        edges[name] = direct | parents | set(ancestors(name))
    found = {name for name, targets in edges.items() if any(root(target) == "torch" for target in targets)}
    while more := {name for name, targets in edges.items() if name not in found and targets & found}:
        found |= more
    return frozenset(found)


def design() -> str:
    """Return DESIGN.md."""
    return (REPOSITORY / "DESIGN.md").read_text(encoding="utf-8")


def not_built() -> str:
    """Return DESIGN.md's section on what is not built yet; empty when everything is."""
    return design().partition("\n## Not built yet\n")[2].partition("\n## ")[0]


@cache
def table() -> list[Row]:
    """Read the import table; refuse a cell that a reader would understand and this test would not."""
    lines = design().partition("| folder | holds | may import |\n")[2].splitlines()
    rows = []
    for line in lines[1:]:
        if not line.startswith("|"):
            break
        paths, _, allowed = (cell.strip() for cell in line.strip("|").split(" | "))
        whole, torch_free, torch = set(), set(), False
        for item in allowed.split(", "):
            if item == "torch":
                torch = True
            elif item == "everything torch-free":
                torch_free |= set(PACKAGES)
            elif match := re.fullmatch(r"(torch-free )?`(\w+)`", item):
                (torch_free if match[1] else whole).add(match[2])
            else:
                assert item == "nothing", f"DESIGN.md: {paths}: cannot read {item!r}"
        names = tuple(path.rstrip("/") for path in re.findall(r"`([^`]+)`", paths))
        rows.append(Row(names, torch, frozenset(whole), frozenset(torch_free)))
    return rows


def row_of(module: Module) -> Row:
    """Return the row with the longest path that holds a module."""
    path = module.path.relative_to(REPOSITORY)
    fitting = [
        (len(prefix), index)
        for index, row in enumerate(table())
        for prefix in row.paths
        if path.is_relative_to(prefix) or path == Path(prefix)
    ]
    assert fitting, f"{path} has no row in DESIGN.md"
    return table()[max(fitting)[1]]


def test_the_table_of_design_has_a_row_for_every_package_and_no_row_for_what_is_gone() -> None:
    rows = {path for row in table() for path in row.paths}
    assert set(PACKAGES) <= rows
    gone = {path for path in rows if not (REPOSITORY / path).exists()}
    assert gone == {path for path in gone if f"`{path}/`" in not_built()}


def test_every_import_is_allowed_by_the_table_of_design() -> None:
    torchful, wrong = needs_torch(), []
    for module in modules().values():
        row = row_of(module)
        for name in sorted(imported(module, functions=True, typing=True)):
            top = root(name)
            if top not in PACKAGES or top == module.package or top in row.whole:
                continue
            if top not in row.torch_free:
                wrong.append(f"{module.name} imports {name}, which its row does not name")
            elif name in torchful:
                wrong.append(f"{module.name} imports {name}, which needs torch")
    assert wrong == []


def test_only_rows_that_say_so_reach_torch() -> None:
    wrong = [name for name in sorted(needs_torch()) if not row_of(modules()[name]).torch]
    assert wrong == []


def test_libraries_are_those_that_pyproject_gives_reasons_for_and_ddp_needs_none() -> None:
    wrong = []
    for module in modules().values():
        allowed = {"torch"} if module.package in ("ddp", "zero", "pipe") else LIBRARIES | {"torch"}
        if module.name == "pipe.wires.driver":
            allowed |= {"cuda"}
        if module.name.startswith("jobs.train.kernels.") and module.name.endswith("_triton"):
            allowed |= {"triton"}
        outside = {root(name) for name in imported(module, functions=True, typing=True)} - set(PACKAGES)
        if extra := outside - set(sys.stdlib_module_names) - allowed:
            wrong.append(f"{module.name} imports {', '.join(sorted(extra))}")
    assert wrong == []


def test_ranks_of_train_jobs_need_torch_alone() -> None:
    """Their Python may be a user's. `rich` is for ranks started by hand; `cuda` and `triton` only if they are there."""
    found, wanted = set[str](), ["jobs.train.main", "jobs.train.verify", "jobs.node.warm", "jobs.checkpoint.writer"]
    outside = dict[str, str]()
    while wanted:
        if (name := wanted.pop()) not in found:
            found.add(name)
            targets = imported(modules()[name], functions=True, typing=False)
            wanted += targets & modules().keys()
            outside |= {root(target): name for target in targets - modules().keys()}
    assert outside.keys() - set(sys.stdlib_module_names) - set(PACKAGES) == {"torch", "rich", "cuda", "triton"}
    assert (outside["rich"], outside["cuda"]) == ("jobs.train.screen", "pipe.wires.driver")


def test_nobody_imports_launch() -> None:
    wrong = [
        name
        for name, module in modules().items()
        if module.package != "launch"
        if any(root(target) == "launch" for target in imported(module, functions=True, typing=True))
    ]
    assert wrong == []


def test_imports_are_absolute() -> None:
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Counting imports inside functions and for types: who reads one module of a circle has to read all of them."""
    graph = {
        name: imported(module, functions=True, typing=True) & (modules().keys() - {name})
        for name, module in modules().items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_import_cycle_between_folders() -> None:
    """Counting imports inside functions. A `__main__.py` stands for itself: it is an entry, which nobody imports."""
    graph: dict[str, set[str]] = {}
    for module in modules().values():
        targets = {
            folder_of(modules()[each]) for each in imported(module, functions=True, typing=False) & modules().keys()
        }
        graph.setdefault(folder_of(module), set()).update(targets - {folder_of(module)})
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def folder_of(module: Module) -> str:
    """Return the folder that a module lies in; an entry is a folder of its own."""
    path = module.path.relative_to(REPOSITORY)
    return str(path if path.name == "__main__.py" else path.parent)


def test_the_submitting_side_imports_without_torch_in_a_fresh_interpreter() -> None:
    submitting = sorted(modules().keys() - needs_torch())
    assert "launch.cli" in submitting
    assert {name for name in modules() if name.startswith("launch.commands.")} <= set(submitting)
    script = """
import importlib, importlib.abc, sys
asked = set()

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            asked.add(name)
            raise ModuleNotFoundError(f"{name} asked for by the submitting side", name=name)

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(f"muster.{name}")
sys.exit(f"asked for {asked}" if asked else 0)
"""
    command = [sys.executable, "-I", "-c", script, str(REPOSITORY), *submitting]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_files_and_functions_stay_small() -> None:
    wrong = []
    sizes = []
    for module in modules().values():
        lines = len(module.path.read_text(encoding="utf-8").splitlines())
        sizes.append(lines)
        if lines > FILE_LINES:
            wrong.append(f"{module.path.relative_to(REPOSITORY)}: {lines} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    wrong.append(f"{module.name}.{node.name}: {length} lines")
    assert statistics.median(sizes) <= MEDIAN_LINES
    assert wrong == []


def test_a_class_name_means_one_thing() -> None:
    """Examples are programs of their own: each may have a `Block`."""
    places: dict[str, list[str]] = {}
    for module in modules().values():
        if "examples" not in module.name:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(module.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_module_at_the_root_shadows_the_standard_library() -> None:
    """A profile.py there would stand before the standard library's and break cProfile, and with it torch._dynamo."""
    roots = {path.stem for path in REPOSITORY.glob("*.py")} | set(PACKAGES)
    assert roots & set(sys.stdlib_module_names) == set()


def test_design_names_no_file_that_is_gone_and_calls_none_unbuilt_that_is_there() -> None:
    built = design().replace(not_built(), "").replace(reading_order(), "")
    named = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\w)`")
    gone = {path for path in named.findall(built) if not (REPOSITORY / path).exists()}
    assert gone == set()
    there = {path for path in named.findall(not_built()) if (REPOSITORY / path).exists()}
    assert there == set()


def reading_order() -> str:
    """Return the table of what to read in each package."""
    return design().partition("| package | in reading order |\n|---|---|\n")[2].partition("\n\n")[0]


def test_the_reading_order_names_files_that_are_there() -> None:
    gone, packages = [], set()
    for row in reading_order().splitlines():
        head, files = row.strip("| ").split(" | ")
        homes = re.findall(r"`([\w/]+)/`", head)
        packages |= {home.partition("/")[0] for home in homes}
        for name in re.findall(r"`([\w/]+)`", files):
            path = name if len(homes) > 1 else f"{homes[0]}/{name}"
            gone += [] if (REPOSITORY / f"{path}.py").is_file() else [path]
    assert gone == []
    assert packages == set(PACKAGES)


def test_muster_holds_a_link_to_every_package_and_nothing_is_imported_by_a_bare_name() -> None:
    links = {path.name: path.readlink() for path in (REPOSITORY / "muster").iterdir() if path.is_symlink()}
    assert links == {package: Path("..") / package for package in PACKAGES}
    own = {str(path.relative_to(REPOSITORY / "muster")) for path in (REPOSITORY / "muster").rglob("*.py")}
    assert own == {"__init__.py", "__main__.py", "public.py", "importable/muster/__init__.py"}
    bare = [
        f"{module.name}:{node.lineno}"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if root(str(name)) in PACKAGES
    ]
    assert bare == []
