"""Read YAML files by the core schema of YAML 1.2, and record the line of every key.

    1e-4 is a number · 0o17 is fifteen · 010 is ten · yes, no, on, off are text · a key given twice is an error

A `Document` collects all mistakes found here or by callers, and raises them as one error with one line each:
`FILE:LINE: KEY.PATH: what was found; what was expected`.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from muster.jobs.basics.errors import JobFileError
from muster.jobs.basics.reading import DEEPEST, SETTINGS_BYTES, read_bytes
from muster.jobs.spec.yamlcore import CONVERT, MOST_VALUES, TAG, CoreDumper, CoreLoader

KeyPath = tuple[str | int, ...]

MERGE_KEY: Final = "<<"


@dataclass(frozen=True)
class KeyPlace:
    """The place where a key was given: line and column of a file, counted from 1, or an argument (line 0)."""

    origin: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.origin}:{self.line}" if self.line else self.origin


@dataclass(frozen=True)
class Mistake:
    """One error: its place, its key, and a text with the found and the expected value."""

    place: KeyPlace
    path: KeyPath
    text: str

    @property
    def key(self) -> str:
        """The key as the user would write it."""
        return spell(self.path)

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.text}" if self.path else f"{self.place}: {self.text}"


@dataclass
class Document:
    """The values of a file, the place of each key, and the mistakes found so far."""

    name: str
    value: Any
    places: dict[KeyPath, KeyPlace] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    unreadable: set[KeyPath] = field(default_factory=set)

    def place(self, path: KeyPath) -> KeyPlace:
        """Return the place of a key, or of the nearest key above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.places.get((), KeyPlace(self.name, 1, 1))

    def without_lines(self) -> "Document":
        """Return this document without line numbers, for a text that the user has not seen."""
        return replace(self, places=dict.fromkeys([(), *self.places], KeyPlace(self.name)))

    def placed(self, message: str) -> str:
        """Prefix a message with the place of the key that it begins with, or with the file if that key is not given."""
        path = tuple(message.partition(": ")[0].split("."))
        given = (path[:length] for length in range(len(path), 0, -1) if path[:length] in self.places)
        key = next(given, ())
        return f"{self.places.get(key, self.name)}: {message}"

    def complain(self, path: KeyPath, text: str) -> None:
        """Add a mistake at a key, unless the key already has one because its value could not be read."""
        if path in self.unreadable:
            return
        self.mistakes.append(Mistake(self.place(path), path, text))

    def mapping(self) -> dict[str, Any]:
        """Return the whole file as a mapping.

        Raises:
            JobFileError: if the file is not a mapping.
        """
        if not isinstance(self.value, dict):
            found = "is empty" if self.value is None else f"contains {show(self.value)}"
            raise JobFileError(f"{self.place(())}: the file {found}; expected lines of the form `key: value`")
        return self.value

    def raise_mistakes(self) -> None:
        """Raise all mistakes as one error, in the order of the file, arguments last.

        Raises:
            JobFileError: if there is at least one mistake.
        """
        if self.mistakes:
            ordered = sorted(self.mistakes, key=lambda mistake: mistake.place.line or float("inf"))
            raise JobFileError("\n".join(dict.fromkeys(str(mistake) for mistake in ordered)))


def spell(path: KeyPath) -> str:
    """Format a key path as the user would write it: `train.optimizer.betas.0`."""
    return ".".join(str(part) for part in path)


def show(value: Any) -> str:
    """Format a value for a message: short, and in YAML's notation."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}..."


def read(path: Path) -> Document:
    """Read and parse a file. The caller handles a missing file.

    Raises:
        JobFileError: if the file cannot be read or is not one YAML document.
        FileNotFoundError: if the file does not exist.
    """
    try:
        text = read_bytes(path, SETTINGS_BYTES, owned=False).decode("utf-8-sig")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JobFileError(f"{path}: cannot be read: {(error.strerror or 'unknown reason').lower()}") from error
    except UnicodeDecodeError as error:
        raise JobFileError(f"{path}: byte {error.start} is not UTF-8 text; expected a YAML file") from error
    except ValueError as error:
        raise JobFileError(f"{error}; expected a YAML file") from error
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """Parse one YAML document and record the place of each key.

    Raises:
        JobFileError: if the text is not YAML, or is too large.
    """
    try:
        node = yaml.compose(text, Loader=CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        column = f" (column {mark.column + 1})" if mark else ""
        raise JobFileError(f"{where}: not YAML: {_problem(error, text)}{column}") from error
    except yaml.YAMLError as error:
        raise JobFileError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    document = Document(name, None)
    if node is not None:
        document.value = _Builder(document).build(node, ())
    return document


def parse_value(text: str) -> Any:
    """Parse one value by the same rules, such as the right side of `--set a.b=c`.

    Raises:
        JobFileError: if the value is not YAML.
    """
    try:
        document = parse(text, "value")
        document.raise_mistakes()
    except JobFileError as error:
        problem = str(error).splitlines()[0].partition(": ")[2]
        raise JobFileError(f"{problem}; put the value in quotes within the shell's quotes") from error
    return document.value


def dump(value: Any) -> str:
    """Write a value as YAML text with the same meaning in YAML 1.1 and 1.2."""
    return yaml.dump(value, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def flow(value: Any) -> str:
    """Write a value as one line of YAML, for an example in a message."""
    return yaml.dump(value, Dumper=CoreDumper, default_flow_style=True, width=10**6, allow_unicode=True).strip()


def _problem(error: yaml.MarkedYAMLError, text: str) -> str:
    problem = error.problem or "unreadable"
    if problem.startswith("but "):
        problem = f"{error.context} {problem}"
    if "\\t" in problem:
        return "a tab; YAML indents with spaces"
    if "mapping values are not allowed" in problem and error.problem_mark is not None:
        line = text.splitlines()[error.problem_mark.line]
        if ": " in line[: error.problem_mark.column]:
            return "a second `: ` on one line; put text that contains `: ` in quotes"
        return "this key is indented further than the line above allows; align it with the other keys of its section"
    if "expected <block end>" in problem:
        return "this line begins in a column where no section begins; align it with the other keys of its section"
    return problem


class _Builder:
    """A converter of composed nodes to values, which records places and mistakes."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.values = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the value of the node at `path`."""
        self.values += 1 + (len(node.value) >> 7)  # an alias repeats its text, so long text counts more
        # Aliases can refer to aliases: nine lines of YAML can expand to a billion values.
        if self.values > MOST_VALUES or len(path) > DEEPEST:
            limit = f"{MOST_VALUES:,} values" if self.values > MOST_VALUES else f"{DEEPEST} levels"
            raise JobFileError(f"{self._place(node)}: more than {limit}, or an alias that contains itself")
        if isinstance(node, yaml.CollectionNode):
            usual = "map" if isinstance(node, yaml.MappingNode) else "seq"
            if node.tag != f"{TAG}{usual}":
                self._complain_of_tag(node, path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            at = [(*path, index) for index in range(len(node.value))]
            self.document.places.update(zip(at, map(self._place, node.value), strict=True))
            return [self.build(item, where) for item, where in zip(node.value, at, strict=True)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place, key = self._place(key_node), key_node.value
            if key_node.tag != f"{TAG}str":
                self._complain(place, path, f"the key {self._source(key_node)} must be text; put it in quotes")
                continue  # no job file may have such a key, so report no other mistake about it
            if key == MERGE_KEY:
                self._complain(place, path, "YAML 1.2 has no merge key <<; write the keys out")
                continue
            at = (*path, key)
            if key in value:
                first = self.document.places[at]
                self._complain(place, at, f"given twice; the first is on line {first.line}; keep one")
                continue
            self.document.places[at] = place
            value[key] = self.build(value_node, at)
        return value

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        if node.tag == f"{TAG}str":
            return self._text(node, path)
        pattern, convert = CONVERT.get(node.tag, (None, None))
        if pattern is None or convert is None:
            self._complain_of_tag(node, path)
            return node.value
        try:
            if pattern.match(node.value):
                return convert(node.value)
        except ValueError:  # a number with thousands of digits
            pass
        self.document.unreadable.add(path)
        self._complain(self._place(node), path, f"{show(node.value)} is not {node.tag.removeprefix(TAG)}")
        return node.value

    def _text(self, node: yaml.Node, path: KeyPath) -> str:
        """Return text. JSON escapes some characters as surrogate pairs, which YAML does not know: join the halves."""
        try:
            return str(node.value).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self._complain(
                self._place(node), path, "has half of a surrogate pair (\\ud800 to \\udfff); write both halves"
            )
            self.document.unreadable.add(path)
            return ""

    def _source(self, node: yaml.Node) -> str:
        return node.value if isinstance(node, yaml.ScalarNode) else "that is a list or a mapping"

    def _complain(self, place: KeyPlace, path: KeyPath, text: str) -> None:
        self.document.mistakes.append(Mistake(place, path, text))

    def _complain_of_tag(self, node: yaml.Node, path: KeyPath) -> None:
        tag = node.tag.replace(TAG, "!!")
        self.document.unreadable.add(path)
        self._complain(self._place(node), path, f"the tag {tag!r} is not known; remove it")

    def _place(self, node: yaml.Node) -> KeyPlace:
        return KeyPlace(self.document.name, node.start_mark.line + 1, node.start_mark.column + 1)
