"""The order of an epoch's samples: the states, at the epoch's start, of the random number generators that decide it.

These are the global generators of Python, numpy and torch, and the generators and epoch counters that are attributes of
the loader, its samplers and its data set. With them, a loader that begins again reads the same batches again.
"""

import base64
import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any, Final

DEEPEST: Final = 8
MOST_OBJECTS: Final = 10_000
MOST_ITEMS: Final = 64  # longer lists hold data
BLOCK: Final = 1 << 15  # the text is padded, so that the memory for checkpoints need not grow with each epoch
COUNTERS: Final = ("epoch", "_epoch")
SKIPPED: Final = {"_iterator"}  # the loader's processes and queues


def order_of(loader: object = None) -> str:
    """Return the states as text: those of the global generators, and of those that the loader has."""
    text = json.dumps({name: _state(owner) for name, owner in _generators(loader)})
    return text.ljust(-len(text) // -BLOCK * BLOCK)


def set_order(text: str, loader: object = None) -> None:
    """Set the generators to states from `order_of`. Those that the text does not name keep theirs."""
    states = json.loads(text)
    for name, owner in [*_generators(loader)]:
        if name in states:
            _set(owner, states[name])


def replayed(loader: Iterable[Any], first: int, order: str) -> Iterator[Any]:
    """Begin a loader in an order, and drop its first batches. The global generators keep their states."""
    now = order_of()
    set_order(order, loader)
    batches = iter(loader)
    for _ in islice(batches, first):
        pass
    set_order(now)
    return batches


def is_in_order(loader: object) -> bool:
    """Return whether a loader reads its samples in the order of their numbers."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return isinstance(loader, list | tuple | range) or type(sampler).__name__ == "SequentialSampler"


def _generators(loader: object) -> Iterator[tuple[str, Any]]:
    """Yield the generators and epoch counters by name, each once."""
    found: list[tuple[str, Any]] = [("python", random._inst)]
    if numpy := sys.modules.get("numpy"):
        found.append(("numpy", numpy.random.mtrand._rand))
    if torch := sys.modules.get("torch"):
        found.append(("torch", torch.default_generator))
    seen = {id(owner) for _, owner in found}
    yield from found
    left = [("loader", loader, DEEPEST)]
    for _ in range(MOST_OBJECTS):
        if not left:
            return
        name, owner, depth = left.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if _kind(owner):
            yield name, owner
        elif depth:
            members = dict(_members(owner))
            left += [(f"{name}.{key}", each, depth - 1) for key, each in members.items() if key not in SKIPPED]
            if hasattr(owner, "__dict__"):
                yield from ((f"{name}.{key}", (owner, key)) for key in COUNTERS if type(members.get(key)) is int)


def _members(owner: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(owner, list | tuple):
        yield from enumerate(owner if len(owner) <= MOST_ITEMS else ())
    elif isinstance(owner, dict):
        yield from owner.items() if len(owner) <= MOST_ITEMS else ()
    elif not isinstance(owner, type | ModuleType | FunctionType):
        yield from getattr(owner, "__dict__", {}).items()


def _kind(owner: Any) -> str:
    """Return which generator this is: "random", "RandomState", "Generator", "torch"; "" for any other object."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if isinstance(owner, random.Random):
        return "random"
    if torch is not None and isinstance(owner, torch.Generator):
        return "torch"
    if numpy is not None and isinstance(owner, numpy.random.RandomState | numpy.random.Generator):
        return type(owner).__name__
    return ""


def _state(owner: Any) -> Any:
    match _kind(owner):
        case "random":
            return owner.getstate()
        case "torch":
            return base64.b64encode(bytes(owner.get_state().tolist())).decode()
        case "":
            return getattr(*owner)
        case kind:
            state = owner.get_state(legacy=False) if kind == "RandomState" else owner.bit_generator.state
            return json.loads(json.dumps(state, default=lambda array: array.tolist()))


def _set(owner: Any, state: Any) -> None:
    match _kind(owner):
        case "random":
            version, words, gauss = state
            owner.setstate((version, tuple(words), gauss))
        case "torch":
            torch = sys.modules["torch"]
            owner.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
        case "":
            setattr(owner[0], owner[1], state)
        case "RandomState":
            owner.set_state(state)
        case _:
            owner.bit_generator.state = state
