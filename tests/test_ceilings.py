"""How large the project may be: lines, words, keys, attributes of a class.

A ceiling may only fall, except by the one commit of an issue that names its allowance (for a row of a benchmark, 60
lines of benchmarks). It follows the count: a count far below its ceiling fails, too, so that room that was made stays
made.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import pytest

from muster.jobs.spec.schema import job_schema
from muster.jobs.spec.site import Site
from muster.launch.common.kinds import KINDS
from support.imports import PACKAGES, REPOSITORY, modules

CEILINGS: Final = {  # {folder or what else is counted: (at most, unit)}; lines are those of Python
    "cloudlab": (2930, "lines"),
    "collectives_bench": (9730, "lines"),
    "ddp": (3140, "lines"),
    "jobs": (35470, "lines"),
    "jobs/examples": (1850, "lines"),
    "launch": (31890, "lines"),
    "muster": (70, "lines"),
    "pipe": (8600, "lines"),
    "slurm": (1440, "lines"),
    "zero": (4300, "lines"),
    "tests": (80480, "lines"),
    "benchmarks": (12200, "lines"),
    "README, DESIGN, docs": (44240, "words"),
    "job file": (169, "keys"),
    "site file": (35, "keys"),
}
# A ceiling that is further above its count than this, and than 1 %, has to be lowered.
SLACK: Final = {"lines": 150, "words": 300, "keys": 1}
ATTRIBUTES: Final = 25
TOO_MANY: Final = {  # classes that wait for an issue: its title
    "Attempt": "Recovery that is proved",
    "Loop": "Users' own loops",
}
VALUES: Final = ("BaseModel", "Struct", "NamedTuple", "TypedDict")  # libraries' base classes of schemas and rows


def lines_in(folder: str) -> int:
    """Count the lines of the Python files in a folder, without those of a folder inside it that has its own row."""
    inner = [REPOSITORY / each for each in CEILINGS if each.startswith(f"{folder}/")]
    paths = (path for path in (REPOSITORY / folder).rglob("*.py") if not any(map(path.is_relative_to, inner)))
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def words() -> int:
    """Count the words of the pages."""
    pages = (REPOSITORY / "README.md", REPOSITORY / "DESIGN.md", *(REPOSITORY / "docs").glob("*.md"))
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def keys_in(schema: dict[str, Any]) -> int:
    """Count the keys that a JSON Schema lets a file have: of its sections, too, each once."""
    return sum(len(each["properties"]) for each in objects_in(schema))


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema of an object with named keys."""
    if isinstance(schema, list):
        for each in schema:
            yield from objects_in(each)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield schema
        for each in schema.values():
            yield from objects_in(each)


def count_of(what: str) -> int:
    """Count what a row of the table limits."""
    if what == "README, DESIGN, docs":
        return words()
    if what == "job file":
        return keys_in(job_schema(KINDS))
    if what == "site file":
        return keys_in(Site.model_json_schema())
    return lines_in(what)


def test_every_package_has_a_ceiling() -> None:
    assert {*PACKAGES, "muster"} <= CEILINGS.keys()


@pytest.mark.parametrize("what", CEILINGS)
def test_nothing_grows_beyond_its_ceiling_and_room_that_was_made_stays_made(what: str) -> None:
    most, unit = CEILINGS[what]
    count = count_of(what)
    assert count <= most, (
        f"{what}: {count} {unit}, and at most {most} are allowed, so that one person can hold the project in the head; "
        "delete something, or raise the ceiling in the one commit of an issue that names its allowance"
    )
    slack = max(SLACK[unit], most // 100)
    assert count >= most - slack, f"{what}: {count} {unit}, far below the ceiling of {most}; lower it to {count}"


def fields_of(node: ast.ClassDef) -> set[str]:
    """Name the attributes of a class's objects: those annotated in its body, and those its methods assign."""
    names = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and "ClassVar" not in ast.unparse(each)
    }
    for method in node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method.args.args:
            first = method.args.args[0].arg
            names |= {
                each.attr
                for each in ast.walk(method)
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                if isinstance(each.value, ast.Name) and each.value.id == first
            }
    return names


def is_schema_or_row(name: str) -> bool:
    """Return whether objects of a class are values, whose attributes are keys or columns and never change."""
    if (node := classes().get(name)) is None:
        return name in VALUES
    frozen = any(re.fullmatch(r"dataclass\(.*frozen=True.*\)", ast.unparse(each)) for each in node.decorator_list)
    return frozen or any(map(is_schema_or_row, bases_of(node)))


def bases_of(node: ast.ClassDef) -> list[str]:
    """Name the base classes of a class, without their modules and parameters."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Return every class of the product, by its name, which is unique (`test_architecture.py`)."""
    nodes = (node for module in modules().values() for node in ast.walk(module.tree))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@cache
def attributes_of(name: str) -> set[str]:
    """Name the attributes of a class, with those that it inherits from classes of ours."""
    if (node := classes().get(name)) is None:
        return frozenset()
    return frozenset(fields_of(node)).union(*map(attributes_of, bases_of(node)))


@pytest.mark.slow
def test_a_class_has_few_attributes() -> None:
    """Schemas and rows may have more: they are lists of keys and columns. A class with more has two tasks."""
    many = {name for name in classes() if len(attributes_of(name)) > ATTRIBUTES and not is_schema_or_row(name)}
    assert many == TOO_MANY.keys(), (
        f"classes with more than {ATTRIBUTES} attributes: divide a class that came; drop one that went from TOO_MANY"
    )
