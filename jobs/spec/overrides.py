"""Apply `--set a.b=c` to a document. The value is YAML. Missing parent mappings are created."""

from collections.abc import Sequence
from typing import Any

from muster.jobs.basics.errors import JobFileError, UsageError
from muster.jobs.basics.reading import DEEPEST, MOST_DIGITS
from muster.jobs.spec import mistakes, yamlfile
from muster.jobs.spec.job import JobKind
from muster.jobs.spec.yamlfile import Document, KeyPath, KeyPlace, Mistake


def apply_override(document: Document, override: str, kinds: Sequence[JobKind]) -> None:
    """Write the value of an override into the document. Later messages about its keys name the override as their place.

    An item of a list is selected by its index from 0. The index after the last item appends an item.

    Raises:
        UsageError: if the override is not of the form `a.b=c`.
    """
    spelt, equals, text = override.partition("=")
    keys = spelt.split(".")
    if not equals or not all(keys) or len(keys) > DEEPEST:
        raise UsageError(f"--set {override}: must be of the form KEY.PATH=VALUE, such as train.optimizer.lr=0.1")
    place = KeyPlace(f"--set {override}")
    try:
        value = yamlfile.parse_value(text)
        parent, path = _descend(document, keys, place, kinds)
        last = _index(parent, keys[-1], path, may_append=True)
    except JobFileError as error:
        document.mistakes.append(Mistake(place, tuple(keys), str(error)))
        return
    if isinstance(parent, list) and last == len(parent):
        parent.append(None)
    parent[last] = value
    path = (*path, last)
    document.places = {known: at for known, at in document.places.items() if known[: len(path)] != path}
    document.places[path] = place


def _descend(document: Document, keys: list[str], place: KeyPlace, kinds: Sequence[JobKind]) -> tuple[Any, KeyPath]:
    """Walk to the parent of the last key, creating missing mappings."""
    parent: Any = document.mapping()
    path: KeyPath = ()
    for key in keys[:-1]:
        index = _index(parent, key, path)
        path = (*path, index)
        child = parent.get(index) if isinstance(parent, dict) else parent[index]
        if not isinstance(child, (dict, list)):
            # `model: vgg11` is short for `model: {name: vgg11}`, so train.model.bias=true extends that mapping.
            child = {"name": child} if isinstance(child, str) and _has_name(path, kinds) else {}
            parent[index] = child
            document.places[path] = place
        parent = child
    return parent, path


def _index(parent: Any, key: str, path: KeyPath, *, may_append: bool = False) -> str | int:
    """Convert a key to an index of `parent`: text for a mapping, an integer for a list."""
    if isinstance(parent, dict):
        return key
    if key.isdecimal() and len(key) <= MOST_DIGITS and int(key) < len(parent) + may_append:
        return int(key)
    raise JobFileError(f"{yamlfile.spell(path)} is a list with {len(parent)} items; give the index of an item, from 0")


def _has_name(path: KeyPath, kinds: Sequence[JobKind]) -> bool:
    """Return True if a single word at this path is short for a mapping with the key `name`."""
    kind = next((kind for kind in kinds if kind.key == path[0]), None)
    model = mistakes.section_model(kind.settings, path[1:]) if kind else None
    return model is not None and "name" in model.model_fields
