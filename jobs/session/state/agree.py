"""Compare the states of all ranks. If they differ, every rank raises, so that none waits for another."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import spell_ranks
from muster.jobs.session.state.leaves import Leaf, fingerprints
from muster.jobs.session.state.modules import ModuleState
from muster.jobs.session.state.stages import StagesState
from muster.jobs.world.world import World


def exchange(world: World, value: object) -> list[Any]:
    """Return every rank's JSON value, in rank order: a collective."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(each) for each in world.gather(torch.tensor([len(data)], device=world.device))]
    room = torch.zeros(max(sizes), dtype=torch.uint8)
    room[: len(data)] = data
    gathered = world.gather(room.to(world.device))
    return [json.loads(bytes(each[:size].tolist())) for each, size in zip(gathered, sizes, strict=True)]


def refuse_together(world: World, problem: str | None) -> None:
    """Raise on every rank if any rank has a problem: a collective.

    Raises:
        RefusedError: if a rank has a problem; the message is that of the first such rank.
    """
    problems = exchange(world, problem)
    if first := next((rank for rank, each in enumerate(problems) if each is not None), None):
        raise RefusedError(f"rank {first}: {problems[first]}")
    if problems[0] is not None:
        raise RefusedError(problems[0])


def agree(world: World, registered: Iterable[object], trees: Mapping[str, Any], leaves: Sequence[Leaf]) -> None:
    """Compare the states of all ranks, and exchange the layer names of pipelines: a collective.

    Raises:
        RefusedError: on every rank, naming the first difference, or the first tensor with missing or repeated elements.
    """
    require_same_state(world, trees, leaves)
    names: set[str] = set()
    for each in registered:
        if isinstance(each, StagesState):
            each.meet(world.rank, exchange(world, each.describe()))
        elif isinstance(each, ModuleState):
            names |= each.names
    require_covered(world, sorted(names), leaves)


def require_same_state(world: World, trees: Mapping[str, Any], leaves: Sequence[Leaf]) -> None:
    """Check that plain values, names, shapes and replicated tensors are equal on all ranks: a collective.

    Raises:
        RefusedError: on every rank, naming the first difference.
    """
    described = [line for name, tree in trees.items() for line in _lines(tree, name)]
    described += [leaf.form for leaf in leaves if leaf.piece is None]
    compared = [leaf for leaf in leaves if leaf.compared and not leaf.is_split]
    sums = fingerprints(compared)
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    both = exchange(world, [digest, hashlib.sha256(bytes(sums.view(torch.uint8).tolist())).hexdigest()])
    if differing := [rank for rank, each in enumerate(both) if each[0] != both[0][0]]:
        theirs = exchange(world, described)
        pairs = zip_longest(theirs[0], theirs[differing[0]], fillvalue="nothing more")
        first, other = next((one, another) for one, another in pairs if one != another)
        raise RefusedError(
            f"state: {other} on {spell_ranks(differing[:8])}, but {first} on rank 0; register the same objects with "
            "the same values on every rank"
        )
    if any(each[1] != both[0][1] for each in both):
        _refuse_contents(world, compared, sums)


def _refuse_contents(world: World, compared: Sequence[Leaf], sums: torch.Tensor) -> None:
    gathered = torch.stack(world.gather(sums.to(world.device))).cpu()  # (ranks, leaves)
    place = int((gathered != gathered[0]).any(0).nonzero()[0])
    differing = (gathered[:, place] != gathered[0, place]).nonzero().flatten().tolist()
    raise RefusedError(
        f"state: {compared[place].name}: its values on {spell_ranks(differing[:8])} differ from rank 0's; wrap the "
        "model in DistributedDataParallel, which copies rank 0's weights to all ranks, or seed every rank alike"
    )


def require_covered(world: World, names: Sequence[str], leaves: Sequence[Leaf]) -> None:
    """Check that exactly one rank writes each element of the named tensors if they are split: a collective.

    Raises:
        RefusedError: on every rank, naming the first tensor with missing or repeated elements.
    """
    held, wanted = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for leaf in leaves:
        if leaf.is_split and leaf.name in held:
            part, answers = leaf.part()
            held[leaf.name] += part.piece.elements if answers else 0
            wanted[leaf.name] = part.piece.tensor_elements
    mine = torch.tensor([[*held.values()], [*wanted.values()]], device=world.device)
    found = torch.stack(world.gather(mine)).cpu()  # (ranks, 2, names): elements that are held, elements of the tensor
    together, whole = found[:, 0].sum(0).tolist(), found[:, 1].amax(0).tolist()
    for name, elements, total in zip(names, together, whole, strict=True):
        if elements != total:
            raise RefusedError(
                f"state: {name}: the ranks together hold {elements} of {total} elements; a model must be sharded over "
                "all ranks of the run, or over a mesh of all of them"
            )


def _lines(record: Any, path: str) -> Iterator[str]:
    """Describe a tree as text, with one line for each value."""
    if isinstance(record, dict) and record.keys() == {"$", "v"} and isinstance(record["v"], list):
        yield f"{path}: {record['$']} of {len(record['v'])}"
        record = record["v"]
    if isinstance(record, dict) and "$" not in record:
        for key, each in sorted(record.items()):
            yield from _lines(each, f"{path}/{key}")
    elif isinstance(record, list):
        yield f"{path}: {len(record)} values"
        for place, each in enumerate(record):
            yield from _lines(each, f"{path}/{place}")
    else:
        yield f"{path} is {json.dumps(record)}"
