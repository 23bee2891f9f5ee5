"""Sections of a job file, as pydantic models or as plain objects. Both kinds have the keys as attributes.

A rank's Python may lack pydantic, so ranks use plain sections (`jobs/spec/plain.py`). The functions here accept both
kinds.
"""

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from pydantic import BaseModel

T = TypeVar("T")


class PlainSection(SimpleNamespace):
    """A section whose keys were checked elsewhere.

    `given` names the keys that are in the file, `changed` the keys whose value is not the default.
    """

    def __init__(self, values: Mapping[str, Any], given: Collection[str], changed: Collection[str]) -> None:
        super().__init__(**values)
        self._given, self._changed = frozenset(given), frozenset(changed)


def given(section: Any) -> frozenset[str]:
    """Return the keys that are in the file."""
    return section._given if isinstance(section, PlainSection) else frozenset(section.model_fields_set)


def values(section: Any) -> dict[str, Any]:
    """Return all keys with their JSON values; nested sections become mappings."""
    if not isinstance(section, PlainSection):
        return _dumped(section)
    return {key: values(value) if isinstance(value, PlainSection) else value for key, value in _own(section).items()}


def changed(section: Any) -> dict[str, Any]:
    """Return the keys whose value is not the default, with their JSON values; do the same in nested sections."""
    if not isinstance(section, PlainSection):
        return _dumped(section, exclude_defaults=True)
    own = {key: value for key, value in _own(section).items() if key in section._changed}
    return {key: changed(value) if isinstance(value, PlainSection) else value for key, value in own.items()}


def replaced(section: T, **updates: Any) -> T:
    """Return a copy of a section with some keys replaced by `updates`."""
    if not isinstance(section, PlainSection):
        return cast(T, cast("BaseModel", section).model_copy(update=updates))
    now = {**_own(section), **updates}
    return type(section)(now, section._given | updates.keys(), section._changed | updates.keys())


def _dumped(section: "BaseModel", **options: Any) -> dict[str, Any]:
    return section.model_dump(mode="json", **options)


def _own(section: PlainSection) -> dict[str, Any]:
    return {key: value for key, value in vars(section).items() if not key.startswith("_")}
