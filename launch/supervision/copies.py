"""Which node keeps copies of which, and which checkpoints the memory of the living nodes holds. Pure.

node 0   shards 0 1 | copies of 2 3        four nodes in two failure domains, here racks: (0 1) (2 3)
node 1   shards 2 3 | copies of 4 5  ...   is wrong: node 0 and node 1 fail together
node 0   shards 0 1 | copies of 4 5        node 2 copies to node 0, node 0 to node 2
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint.names import position, step_and_attempt

MOST_SETS: Final = 8  # checkpoints that count of one node

Slot = int


@dataclass(frozen=True)
class Partners:
    """{slot: slot of the node that keeps its copies, or None}, and how many pairs share a host or a failure domain."""

    of: Mapping[Slot, Slot | None]
    together: int


def partners(hosts: Mapping[Slot, str], domains: Mapping[str, str]) -> Partners:
    """Choose a partner for every node: in another failure domain, else on another host, else any other node.

    `domains`: {host: failure domain}. A host without one is a domain of its own. Every node keeps the copies of one
    other node if no domain has more than half of the nodes.
    """
    place = {slot: (domains.get(host, host), host) for slot, host in hosts.items()}
    order = sorted(place, key=lambda slot: (place[slot], slot))
    count = len(order)
    first = [domain for domain, _ in place.values()]
    # Nodes of one domain are neighbours in `order`, so a shift by the size of the largest leads out of every domain.
    shift = max(map(first.count, set(first)), default=0) % max(count, 1) or 1
    found: dict[Slot, Slot | None] = {}
    for index, slot in enumerate(order):
        others = [order[(index + shift + more) % count] for more in range(count)]
        elsewhere = [each for each in others if place[each][0] != place[slot][0]]
        apart = [each for each in others if place[each][1] != place[slot][1]]
        found[slot] = next((each for each in (*elsewhere, *apart, *others) if each != slot), None)
    pairs = [(place[slot], place[other]) for slot, other in found.items() if other is not None]
    return Partners(found, together=sum(own[0] == other[0] for own, other in pairs))


@dataclass(frozen=True)
class InMemory:
    """A checkpoint of which the living nodes hold every shard. `holders`: {rank: slots that have its shard}."""

    name: str
    step: int
    nbytes: int
    holders: Mapping[int, Sequence[Slot]]

    @property
    def runs(self) -> dict[Slot, tuple[tuple[int, int], ...]]:
        """{slot: the shards that it has, as (first, last) of consecutive ranks}."""
        found: dict[Slot, list[tuple[int, int]]] = {}
        for writer, slots in sorted(self.holders.items()):
            for slot in slots:
                runs = found.setdefault(slot, [])
                if runs and runs[-1][1] == writer - 1:
                    runs[-1] = (runs[-1][0], writer)
                else:
                    runs.append((writer, writer))
        return {slot: tuple(runs) for slot, runs in sorted(found.items())}


class Holdings:
    """The shards in the memory of every node, as the nodes have reported them."""

    def __init__(self) -> None:
        self._sets: dict[str, int] = {}  # {checkpoint: number of its shards}
        self._count: dict[str, int] = {}  # {checkpoint: number of reports about its shards}
        self._held: dict[Slot, dict[str, dict[int, tuple[str, int]]]] = {}  # {slot: {checkpoint: {rank: sha256, size}}}
        self.lost: dict[str, set[Slot]] = {}  # {checkpoint: nodes that had a part of it and are lost}

    def note(self, slot: Slot, name: str, writer: int, writers: int, sha256: str, nbytes: int) -> None:
        """Record that a node has a shard.

        Raises:
            BadCheckpointError: if the report is invalid.
        """
        held = self._held.setdefault(slot, {})
        if step_and_attempt(name) is None or writer >= writers or self._sets.get(name, writers) != writers:
            raise BadCheckpointError(f"reported an invalid shard {writer} of {writers} of {name!r:.80}")
        if name not in held and len(held) >= MOST_SETS:  # it has deleted those of which a copy failed
            oldest = min(held, key=position)
            self._count[oldest] -= len(held.pop(oldest))
        self._sets[name] = writers
        self._count[name] = self._count.get(name, 0) + (writer not in held.get(name, {}))
        held.setdefault(name, {})[writer] = (sha256, nbytes)

    def lose(self, slot: Slot) -> None:
        """Forget what a lost node had."""
        for name, shards in self._held.pop(slot, {}).items():
            self._count[name] -= len(shards)
            self.lost.setdefault(name, set()).add(slot)

    def keep_from(self, name: str, *, only: bool = False) -> None:
        """Forget the checkpoints before `name`; with `only`, all others."""
        gone = [each for each in self._sets if each != name and (only or position(each) < position(name))]
        for each in gone:
            del self._sets[each], self._count[each]
            self.lost.pop(each, None)
            for held in self._held.values():
                held.pop(each, None)

    def holders(self, name: str, slots: Collection[Slot]) -> dict[int, list[Slot]]:
        """Return {rank: the slots that have its shard}. If nodes report different contents, no node counts."""
        found: dict[int, list[Slot]] = {writer: [] for writer in range(self._sets.get(name, 0))}
        contents: dict[int, set[str]] = {writer: set() for writer in found}
        for slot in slots:
            for writer, (sha256, _) in self._held.get(slot, {}).get(name, {}).items():
                found[writer].append(slot)
                contents[writer].add(sha256)
        return {writer: each if len(contents[writer]) == 1 else [] for writer, each in found.items()}

    def available(self, slots: Collection[Slot]) -> list[InMemory]:
        """List the checkpoints of which the nodes in `slots` have every shard, newest first."""
        found = []
        for name in sorted(self._sets, key=position, reverse=True):
            holders = self.holders(name, slots)
            if all(holders.values()):
                found.append(InMemory(name, position(name)[0], self._size(name), holders))
        return found

    def is_safe(self, name: str, slots: Collection[Slot], of: Mapping[Slot, Slot | None]) -> bool:
        """Return whether two nodes have each shard of a checkpoint, or one that has no partner."""
        if self._count.get(name, 0) < self._sets.get(name, 0) * (1 + any(each is not None for each in of.values())):
            return False  # the usual answer, at once
        holders = self.holders(name, slots).values()
        return all(len(each) > 1 or (len(each) == 1 and of.get(each[0]) is None) for each in holders)

    def unavailable(self, name: str, slots: Collection[Slot]) -> tuple[list[int], set[Slot]] | None:
        """Return the shards of a checkpoint that no node in `slots` has, and the lost nodes; None if there is none."""
        missing = [writer for writer, each in self.holders(name, slots).items() if not each]
        return (missing, self.lost.get(name, set())) if missing else None

    def nbytes(self, slot: Slot, other: Slot | None = None) -> int:
        """Return how many bytes a node holds; with `other`, of the shards that this other node holds, too."""
        return sum(
            size
            for name, held in self._held.get(slot, {}).items()
            for writer, (_, size) in held.items()
            if other is None or writer in self._held.get(other, {}).get(name, {})
        )

    def _size(self, name: str) -> int:
        sizes = {writer: size for held in self._held.values() for writer, (_, size) in held.get(name, {}).items()}
        return sum(sizes.values())


def domains_of(groups: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return {host: its failure domain} for lists of hosts that fail together."""
    return {host: f"domain {number}" for number, hosts in enumerate(groups) for host in hosts}
