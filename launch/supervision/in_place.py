"""Decide whether the ranks that are left continue without those that were lost, and number them anew. Pure.

    attempt 0    node 0: ranks 0 1    node 1: ranks 2 3        rank 1 is killed
    attempt 1    node 0: rank  0      node 1: ranks 1 2        the same processes, with the state that they have
                 node 0: rank  3 starts, and waits
    attempt 2    node 0: ranks 0 1    node 1: ranks 2 3        rank 3 has become rank 1, and receives the state

A split model has copies if `parallel.data` is greater than 1, and every part of a copy needs a rank. Ranks that are
left over end, and replacements start for them, too:

    stage 0    ranks 0 1    rank 1 is killed    stage 0    rank 0        rank 3 ends, because its copy lacks a stage
    stage 1    ranks 2 3                        stage 1    rank 1 (2)

Ranks that hold the same state form a group (`jobs/train/regroup.py` reports them). As long as one rank of each group
lives, nothing is lost. If a group is lost, or the state is divided over the ranks (ZeRO), all ranks reload the newest
checkpoint of which the memory of the living nodes has every shard. In all other cases the run restarts.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from muster.jobs.basics.words import counted, spell_ranks
from muster.jobs.hosts.placement import NodePlacement, Placement
from muster.jobs.spec.failover import RestartSettings
from muster.jobs.spec.modes import Parallel
from muster.launch.records.verdict import RankEnd

TRIES: Final = 2  # attempts in a row that may begin in place without completing a step
# How a program ends its rank: with an exit code, or by a signal after an error that it did not catch. The SIGTERM may
# come from a scheduler.
OF_PROGRAM: Final = (None, "SIGTERM", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")

Groups = Sequence[Collection[int]]


@dataclass(frozen=True)
class Regrouping:
    """The ranks of the next attempt. `adopted`: {rank there: rank in the ended attempt} of those that continue."""

    slots: tuple[int, ...]
    nodes: tuple[NodePlacement, ...]
    adopted: Mapping[int, int]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(node.ranks for node in self.nodes)

    def lost(self, groups: Groups) -> Collection[int] | None:
        """Return the first of the ended attempt's groups of which no rank continues; None if there is none."""
        alive = set(self.adopted.values())
        return next((group for group in groups if not alive.intersection(group)), None)

    def reloads(self, groups: Groups) -> bool:
        """Return whether the next attempt needs a checkpoint, because its ranks do not have all of the state."""
        return not groups or self.lost(groups) is not None

    def groups(self, before: Groups) -> list[frozenset[int]]:
        """Return the groups of the ended attempt, with the ranks that continue under their new numbers."""
        return [frozenset(rank for rank, old in self.adopted.items() if old in group) for group in before]


@dataclass(frozen=True)
class Spread:
    """How the state is spread over the ranks of an attempt, as rank 0 reports it.

    `groups`: ranks with copies of the same state. `unique`: why there are none. `reloads`: any number of ranks can
    continue from a checkpoint in memory.
    """

    groups: Groups = ()
    unique: str = ""
    reloads: bool = False

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> "Spread":
        """Read rank 0's report."""
        groups = [
            range(first, first + count * max(stride, 1), max(stride, 1)) for first, count, stride in report["groups"]
        ]
        return cls(groups, report["why"], report["reloads"])

    def after(self, regrouping: Regrouping) -> "Spread":
        """Return how the state is spread over the ranks that continue, until rank 0 reports it."""
        reloads = regrouping.reloads(self.groups)
        return replace(self, groups=() if reloads else regrouping.groups(self.groups))


@dataclass(frozen=True)
class Part:
    """A part of a split model, by its place in the mesh (`pipe/mesh.py`). All its copies have the same state."""

    stage: int
    tensor: int

    @classmethod
    def of(cls, rank: int, data: int, tensor: int) -> "Part":
        """Return the part of the model that a rank has, if the model has `data` copies."""
        return cls(rank // (data * tensor), rank % tensor)


def of_whole_copies(living: Collection[int], split: Parallel) -> set[int]:
    """Return living ranks that form whole copies: as many as ranks with the rarest part of the model live.

    Ranks of a copy that has lost a rank are chosen last, because it often loses all of its ranks.
    """
    size, alive = split.tensor, {*living}
    stages = [
        [copy for copy in range(split.data) if alive.issuperset(range(start + copy * size, start + copy * size + size))]
        for start in range(0, split.world_size, split.data * size)
    ]  # for each stage, the copies of it whose ranks all live
    copies = min(len(each) for each in stages)
    complete = Counter(copy for each in stages for copy in each)
    return {
        (stage * split.data + copy) * size + tensor
        for stage, each in enumerate(stages)
        for copy in sorted(each, key=lambda copy: -complete[copy])[:copies]
        for tensor in range(size)
    }


def regroup(
    placement: Placement,
    slots: Sequence[int],
    living: Collection[int],
    joiners: Mapping[int, int],
    place: Callable[[int], NodePlacement],
    split: Parallel | None = None,
) -> Regrouping:
    """Number the living ranks of an attempt anew, in their old order. Nodes without a rank are left out.

    `joiners`: {number so far: slot} of ranks that wait to join. They come last on their node, and nodes with none but
    joiners come last, so that rank 0 has the state. `place(slot)`: the node of a slot. `split`: that of the attempt. A
    rank that continues keeps its part of the model. If that is impossible, the result has no ranks.
    """
    split = split or Parallel(data=placement.world_size)
    parts = split.pipe * split.tensor
    if parts > 1:
        living = of_whole_copies(living, split)
    here = {
        slot: [rank for rank in node.rank_range if rank in living]
        for slot, node in zip(slots, placement.nodes, strict=False)
    }
    for rank, slot in sorted(joiners.items()):
        here.setdefault(slot, []).append(rank)
    kept = [slot for slot, ranks in here.items() if ranks]
    kept.sort(key=lambda slot: all(rank in joiners for rank in here[slot]))
    copies, left = divmod(sum(len(here[slot]) for slot in kept), parts)
    chosen, nodes, adopted = list[int](), list[NodePlacement](), dict[int, int]()

    def placed(slot: int) -> list[int]:
        """Order a node's ranks so that each gets its own part, from the next free number on; [] if that fails."""
        order, free = list[int](), [*here[slot]]
        for number in range(len(adopted), len(adopted) + len(free)):
            wanted = Part.of(number, copies, split.tensor)
            fits = (rank for rank in free if rank in joiners or Part.of(rank, split.data, split.tensor) == wanted)
            if (rank := next(fits, None)) is None:
                return []
            free.remove(rank)
            order.append(rank)
        return order

    while kept and copies and not left:
        slot, order = next(((slot, order) for slot in kept if (order := placed(slot))), (0, []))
        if not order:
            return Regrouping((), (), {})
        kept.remove(slot)
        chosen.append(slot)
        nodes.append(replace(place(slot), node_rank=len(nodes), first_rank=len(adopted), ranks=len(order)))
        adopted |= {len(adopted) + index: rank for index, rank in enumerate(order)}
    return Regrouping(tuple(chosen), tuple(nodes), adopted)


def missing(placement: Placement, slots: Sequence[int], idle: Collection[int], full: Callable[[int], int]) -> list[int]:
    """List the slot of every rank that an attempt lacks: on its own nodes, and on `idle` ones that could take part.

    `full(slot)`: the number of ranks of a node.
    """
    has = {slot: node.ranks for slot, node in zip(slots, placement.nodes, strict=False)}
    return [slot for slot in (*slots, *idle) for _ in range(full(slot) - has.get(slot, 0))]


def why_not(
    ending: RankEnd,
    regrouping: Regrouping,
    spread: Spread,
    settings: RestartSettings | None,
    *,
    memory: str,
    used: int,
    tries: int,
    nodes: int,
    least: int,
    misfit: Callable[[int], str],
) -> str:
    """Return why the other ranks cannot continue after the first failure of an attempt; "" if they can.

    `memory`: why the memory of the nodes has no checkpoint, or "". `used`: restarts so far. `tries`: attempts in a row
    that began in place and completed no step. `nodes`: nodes that are left, and `least` how many the job needs.
    `misfit(n)`: why the job cannot run on n ranks, or "".
    """
    if settings is None or settings.in_place != "auto":
        return "restart.in_place is not set"
    if ending.cause != "own" or ending.hung or (ending.rank is not None and ending.signal in OF_PROGRAM):
        return "the failure may be one of the program"
    if used >= settings.max:
        return "restart.max is used up"
    if tries >= TRIES:
        return f"{counted(tries, 'attempt')} in a row began in place and completed no step"
    if regrouping.reloads(spread.groups) and (memory or not spread.reloads):
        lost = regrouping.lost(spread.groups) or ()
        missing = f"no living rank has the state of {spell_ranks(sorted(lost)[:8])}" if lost else spread.unique
        also = f", and {memory}" if missing and spread.reloads else ""
        return f"{missing}{also}" or "the ranks have not begun to train"
    if nodes < least:
        return f"{counted(nodes, 'node')} left, and the job needs {least} (restart.min_nodes)"
    return misfit(regrouping.world_size)
