"""Fit constants for each kind of world, and test them on held-out worlds. This is the second stage of fitting."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.cost.constants import UNSURE, Constants
from muster.collectives_bench.cost.curves import Curve, Points, short
from muster.collectives_bench.cost.heldout import Pair, errors_of, quantiles
from muster.collectives_bench.cost.predicting import unusual
from muster.collectives_bench.cost.profile import Profile
from muster.collectives_bench.cost.shared import LINKS, NAMES, MeasuredPoint, fit_constants
from muster.collectives_bench.records import BenchHeader, WorldRecord

LEAST_WORLDS: Final = 3  # if one world is held out, two remain, which show the change between worlds


@dataclass(frozen=True)
class Known:
    """A fitted curve, with its measurements and the predictions of its held-out sizes."""

    curve: Curve
    measured: Points
    left_out: list[Pair]

    @property
    def world(self) -> tuple[int, int]:
        """The number of ranks and of nodes."""
        return self.curve.ranks, self.curve.nodes


def hosts_of(headers: Sequence[BenchHeader]) -> dict[WorldRecord, int]:
    """Return the number of real machines of each world. Simulated nodes share a machine."""
    return {header.world: len({facts.host for facts in header.hosts}) or header.world.nodes for header in headers}


def cores_of(headers: Sequence[BenchHeader]) -> int:
    """Return the smallest number of cores of any host; 1 if unknown."""
    return min((facts.cores for header in headers for facts in header.hosts), default=1)


def usual(known: Iterable[Known]) -> list[Known]:
    """Return the most usual curve of single calls for each operation, world, dtype, backend and device."""
    found: dict[tuple[object, ...], Known] = {}
    for each in sorted(known, key=lambda each: unusual(each.curve)):
        curve = each.curve
        if not curve.back_to_back:
            found.setdefault((curve.operation, each.world, curve.dtype, curve.backend, curve.device), each)
    return list(found.values())


@dataclass(frozen=True)
class Shared:
    """The fit of the constants of each kind of world, with a test on held-out worlds."""

    known: list[Known]
    hosts: dict[WorldRecord, int]
    cores: int

    def fitted(self) -> tuple[list[Constants], list[Pair]]:
        """Return the constants, and pairs of predictions and measurements for held-out worlds."""
        found, pairs = [], []
        for group in self.groups():
            left_out = [pair for world in self.worlds_left_out(group).values() for pair in world]
            low, high = quantiles(left_out) if left_out else UNSURE
            tried = {"low": low, "high": high, "held_out": errors_of(left_out)}
            found.append(self.constants(group).model_copy(update=tried))
            pairs += left_out
        return found, pairs

    def groups(self) -> list[list[Known]]:
        """Group curves by kind of world: backend, device, dtype, and whether there is more than one node."""
        groups: dict[tuple[str, str, str, bool], list[Known]] = {}
        for each in usual(self.known):
            curve = each.curve
            groups.setdefault((curve.backend, curve.device, curve.dtype, curve.nodes > 1), []).append(each)
        return list(groups.values())

    def worlds_left_out(self, group: Sequence[Known]) -> dict[tuple[int, int], list[Pair]]:
        """Predict each world from the other worlds; return {} if there are too few worlds."""
        worlds = sorted({each.world for each in group})
        return {} if len(worlds) < LEAST_WORLDS else {world: self.world_left_out(group, world) for world in worlds}

    def names(self, group: Sequence[Known]) -> Sequence[str]:
        """Return the names of the constants to fit: with NCCL or one rank per host, only those of the links."""
        alone = all(each.curve.ranks == self._hosts(each.curve) for each in group)
        return LINKS if group[0].curve.backend == "nccl" or alone else NAMES

    def world_left_out(self, group: Sequence[Known], world: tuple[int, int]) -> list[Pair]:
        """Predict each point of a world from the other worlds.

        Operations that were not measured in other worlds are skipped.
        """
        others = [each for each in group if each.world != world]
        rest = Profile(name="", curves=[each.curve for each in others], constants=[self.constants(others)])
        return [
            (rest.predict(each.curve.operation, size, ranks=world[0], nodes=world[1]).seconds, took)
            for each in group
            if each.world == world and each.curve.operation in rest.operations
            for size, took in each.measured
        ]

    def constants(self, group: Sequence[Known]) -> Constants:
        """Fit the constants of one kind of world."""
        curves = [each.curve for each in group]
        sized = [each for each in curves if OPERATIONS[each.operation].has_size]
        first = curves[0]
        one_host = first.nodes > 1 and all(self._hosts(curve) == 1 for curve in curves)
        points = [
            MeasuredPoint(each.curve.operation, size, each.curve.ranks, 1 if one_host else each.curve.nodes, took)
            for each in group
            if each.curve.operation != "ping_pong"  # it uses two ranks in a world of any size
            for size, took in each.measured
        ]
        values: dict[str, Any] = {}
        if points:
            found = fit_constants(points, backend=first.backend, cores=self.cores, form=self.names(group))
            values = {name: short(value) for name, value in found.items()}
        return Constants(
            backend=first.backend,
            device=first.device,
            dtype=first.dtype,
            network=first.nodes > 1,
            one_host=one_host,
            cores=self.cores,
            worlds=sorted({curve.ranks for curve in curves}),
            operations=[name for name in OPERATIONS if name in {curve.operation for curve in curves}],
            sizes=(min(curve.smallest for curve in sized), max(curve.largest for curve in sized)) if sized else (0, 0),
            **values,
        )

    def _hosts(self, curve: Curve) -> int:
        worlds = (world for world in self.hosts if (world.ranks, world.nodes) == (curve.ranks, curve.nodes))
        return min((self.hosts[world] for world in worlds), default=curve.nodes)
