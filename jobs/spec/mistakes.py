"""Translate pydantic's validation errors into Muster's wording: one mistake per key of the file.

nodes: must be a whole number, got 'two'
train.optimzer: unknown key; did you mean 'optimizer'?
"""

import copy
import json
import re
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from muster.jobs.basics.words import did_you_mean
from muster.jobs.spec.gone import gone
from muster.jobs.spec.yamlfile import Document, KeyPath, show, spell

Model = TypeVar("Model", bound=BaseModel)

WANTED: Final[Mapping[str, str]] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping (lines of the form `key: value`)",
    "model_type": "a mapping (lines of the form `key: value`)",
    "model_attributes_type": "a mapping (lines of the form `key: value`)",
    "none_required": "empty",
}
LIMITS: Final[Mapping[str, tuple[str, str]]] = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def check(
    model: type[Model],
    section: Any,
    document: Document,
    prefix: KeyPath = (),
    *,
    written: Any = None,
    above: Sequence[str] = (),
) -> Model | None:
    """Build `model` from a section of a document, or add the errors to the document's mistakes.

    A model compares its keys with each other only after each key is valid by itself. So unknown keys are reported and
    removed, and the rest is validated again. In this way all errors are reported at once.

    Args:
        written: the section as written in the file, if the caller wrapped it in another value.
        above: the keys that are valid at the top of the file.
    """
    try:
        return model.model_validate(section)
    except ValidationError as error:
        errors = error.errors()
    written = section if written is None else written
    reported = _add_mistakes(errors, model, written, document, prefix, above)
    unknown = [_locate(error, written, prefix) for error in errors if error["type"] == "extra_forbidden"]
    if len(unknown) == len(errors):
        try:
            model.model_validate(_without(section, [path[len(prefix) :] for path in unknown]))
        except ValidationError as error:
            # An unknown key may be a missing one, misspelt, so other errors of that section are not reported.
            levels = {path[:-1] for path in unknown}
            later = [item for item in error.errors() if _locate(item, written, prefix) not in levels | reported]
            _add_mistakes(later, model, written, document, prefix, above)
    return None


def section_model(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel] | None:
    """Return the model of the section at `path` below `model`, or None if that is not a section."""
    current = model
    for part in path:
        field = current.model_fields.get(str(part))
        found = _model_in(field.annotation) if field else None
        if found is None:
            return None
        current = found
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)
    return None


def _add_mistakes(
    errors: list[ErrorDetails],
    model: type[BaseModel],
    written: Any,
    document: Document,
    prefix: KeyPath,
    above: Sequence[str],
) -> set[KeyPath]:
    """Add one mistake for each key that has errors, and return those keys."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_locate(error, written, prefix), []).append(error)
    within = {path[:length] for path in by_path for length in range(len(path))}
    for path, group in by_path.items():
        if path in within and all(_wanted(error) for error in group):
            continue  # a union: report the errors within the member that the user meant, not those of other members
        if group[0]["type"] == "extra_forbidden":
            text = gone(str(path[-1])) or _unknown_within(path, model, prefix, above)
        else:
            text = gone(spell(path[-1:]), group[0]["input"]) or _message_for(group, _override(document, path))
        document.complain(path, text)
    return set(by_path)


def _unknown_within(path: KeyPath, model: type[BaseModel], prefix: KeyPath, above: Sequence[str]) -> str:
    """Return a message for an unknown key. If a section around this one has such a key, the message says so."""
    key, owner = str(path[-1]), section_model(model, path[len(prefix) : -1])
    for length in range(len(path) - 2, len(prefix) - 1, -1):
        around = section_model(model, path[len(prefix) : length])
        if around is not None and key in around.model_fields:
            return misplaced(f"{spell(path[:length])}:")
    if key in above:
        return misplaced("the top of the file")
    return unknown_key(key, list(owner.model_fields) if owner else [])


def misplaced(place: str) -> str:
    """Return a message for a key that is valid in another place."""
    return f"unknown key here; it belongs to {place}, move it there"


def unknown_key(key: str, valid: Sequence[str]) -> str:
    """Return a message for an unknown key, with the nearest valid key, or all valid keys if none is near."""
    near = did_you_mean(key, valid)
    return f"unknown key{near}" if near else f"unknown key; valid here: {', '.join(valid) or 'none'}"


def _locate(error: ErrorDetails, written: Any, prefix: KeyPath) -> KeyPath:
    """Return the path of the wrong key. Parts that pydantic adds (the name of a union's member) are dropped."""
    path, value = list(prefix), written
    location = error["loc"]
    for position, part in enumerate(location):
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]
            path.append(part)
        elif error["type"] == "missing" and position == len(location) - 1:
            path.append(part)
    return tuple(path)


def _message_for(group: list[ErrorDetails], override: tuple[str, str] | None) -> str:
    """Return a message with the expected and the found value. A key of several types has an error for each."""
    error = next((item for item in group if item["type"] in LIMITS), group[0])
    kind, context, found = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return "missing; add this key"
    if kind == "value_error":
        return str(context["error"])
    if kind in LIMITS:
        words, key = LIMITS[kind]
        return f"must be {words} {_plain(context[key])}, got {show(found)}"
    if kind in ("too_short", "too_long"):
        limit, word = ("min_length", "at least") if kind == "too_short" else ("max_length", "at most")
        items = "item" if context[limit] == 1 else "items"
        return f"must have {word} {context[limit]} {items}, got {context['actual_length']}"
    if kind == "string_pattern_mismatch":  # only the name of a job has a pattern
        return f"must be up to 64 letters, digits, `.`, `_` or `-`, and begin with a letter or digit, got {show(found)}"
    wanted = list(dict.fromkeys(phrase for item in group if (phrase := _wanted(item))))
    if not wanted:
        return f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {show(found)}"
    return f"must be {' or '.join(wanted)}, got {show(found)}{_advice(group, found, override)}"


def _wanted(error: ErrorDetails) -> str | None:
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    return WANTED.get(error["type"])


def _override(document: Document, path: KeyPath) -> tuple[str, str] | None:
    """Return key and value of the `--set` that gave exactly this key, else None."""
    origin, equals, text = document.place(path).origin.partition("=")
    return (spell(path), text) if equals and origin == f"--set {spell(path)}" else None


def _advice(group: list[ErrorDetails], found: Any, override: tuple[str, str] | None) -> str:
    kinds = {error["type"] for error in group}
    if "string_type" in kinds and isinstance(found, (bool, int, float)) and "int_type" not in kinds:
        if override is None:
            return "; put it in quotes"
        # The shell removes quotes, so the whole argument needs its own pair.
        key, text = override
        return f"; write --set {shlex.quote(f'{key}={json.dumps(text)}')}"
    if "bool_type" in kinds and str(found).lower() in ("yes", "no", "on", "off"):
        return "; YAML 1.2 has only true and false"
    if isinstance(found, str):
        literals = [name for error in group for name in re.findall(r"'([^']*)'", str(error.get("ctx", {})))]
        return did_you_mean(found, literals)
    return ""


def _plain(number: float) -> str:
    """Format 1.0 as 1, so that limits look the same for integers and floats."""
    return str(int(number)) if number == int(number) else str(number)


def _without(section: Any, paths: list[KeyPath]) -> Any:
    """Copy a section without the keys at `paths`, all of which exist."""
    pruned = copy.deepcopy(section)
    for path in paths:
        parent = pruned
        for part in path[:-1]:
            parent = parent[part]
        del parent[path[-1]]
    return pruned
