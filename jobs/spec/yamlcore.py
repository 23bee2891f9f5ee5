"""A loader and a dumper for YAML 1.2's core schema. The dumped text means the same in YAML 1.1."""

import re
from collections.abc import Callable
from typing import Any, Final

import yaml

from muster.jobs.basics.reading import DEEPEST

TAG: Final = "tag:yaml.org,2002:"
MOST_VALUES: Final = 20_000  # PyYAML takes a second for 30,000 values
ODD_LINE_ENDS: Final = frozenset("\x85\u2028\u2029")


class CoreLoader(yaml.SafeLoader):
    """A loader that resolves plain scalars by the core schema of YAML 1.2; PyYAML follows 1.1.

    It refuses documents that are nested too deep or have too many values: PyYAML's time is quadratic in the depth.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = self.values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth, self.values = self.depth + 1, self.values + 1
        self._check(self.depth, self.values)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        self._check(self.flow_level, self.values)
        super().fetch_flow_collection_start(token)

    def _check(self, depth: int, values: int) -> None:
        if depth > DEEPEST or values > MOST_VALUES:
            limit = f"{DEEPEST} levels" if depth > DEEPEST else f"{MOST_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=f"more than {limit}", problem_mark=self.get_mark())


CoreLoader.yaml_implicit_resolvers = {}  # drop the resolvers of YAML 1.1


class CoreDumper(yaml.SafeDumper):
    """A dumper that quotes every string that YAML 1.1 or 1.2 would read as another type, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML 6.0 writes these line ends unescaped in single quotes, and reads them back as a space.
        style = '"' if ODD_LINE_ENDS & set(data) else None
        return self.represent_scalar(f"{TAG}str", data, style=style)


CoreDumper.add_representer(str, CoreDumper.represent_str)


def _integer(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:], base) if base != 10 else int(text)


def _float(text: str) -> float:
    return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))


# YAML 1.2.2, section 10.3.2: the types of plain text, tried in this order. The third column lists possible first
# characters of such a text.
_SCALARS: Final[tuple[tuple[str, str, str, Callable[[str], Any]], ...]] = (
    ("null", r"null|Null|NULL|~|", "nN~\0", lambda text: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", _integer),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
        _float,
    ),
)
CONVERT: Final = {TAG + name: (re.compile(f"({pattern})\\Z"), convert) for name, pattern, _, convert in _SCALARS}

for _name, _pattern, _first, _ in _SCALARS:
    _letters = ["" if letter == "\0" else letter for letter in _first]
    for _class in (CoreLoader, CoreDumper):
        _class.add_implicit_resolver(TAG + _name, re.compile(f"({_pattern})\\Z"), _letters)
