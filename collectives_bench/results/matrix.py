"""Matrices of bandwidth and latency between all pairs of nodes, as text."""

from collections.abc import Sequence
from statistics import median
from typing import Final

from muster.collectives_bench.records import Pair, SampleTimes
from muster.collectives_bench.results.table import number
from muster.collectives_bench.sizes import size_text

MOST_NODES: Final = 16  # largest matrix; with more nodes, only the slowest and fastest links are listed
ENDS: Final = 5
WIDTH: Final = 8

Value = dict[tuple[int, int], float]


def lines(pairs: Sequence[Pair]) -> list[str]:
    """Format both matrices of one world, its hosts and its failed pairs. Without pairs, return an empty list."""
    if not pairs:
        return []
    hosts = dict(
        sorted({node: host for pair in pairs for node, host in zip(pair.nodes, pair.hosts, strict=True)}.items())
    )
    speed, delay = bandwidths(pairs), latencies(pairs)
    found = [
        "#",
        f"# pairs of {len(hosts)} nodes, {size_text(pairs[0].nbytes)} messages · {pairs[0].world.text}",
    ]
    found += [f"# node {node}: {host}" for node, host in hosts.items()]
    if len(hosts) <= MOST_NODES:
        found += ["#", "# bandwidth from the row's node to the column's (GB/s)", *_matrix(list(hosts), speed)]
        found += ["#", "# latency of 8 bytes, one way (us)", *_matrix(list(hosts), delay)]
    else:
        ordered = sorted(speed, key=speed.__getitem__)
        for word, ends in (("slowest", ordered[:ENDS]), ("quickest", ordered[: -ENDS - 1 : -1])):
            for way in ends:
                found.append(f"# {word}: node {way[0]} to node {way[1]}: {number(speed[way])} GB/s")
    for pair in pairs:
        if pair.state != "ok":
            found.append(
                f"# nodes {pair.nodes[0]} and {pair.nodes[1]}, launch {pair.launch + 1}: {pair.state}: {pair.reason}"
            )
    return found


def bandwidths(pairs: Sequence[Pair]) -> Value:
    """Return the bandwidth in GB/s from one node to another, the median over launches."""
    found: dict[tuple[int, int], list[float]] = {}
    for pair in pairs:
        first, second = pair.nodes
        for way, timing in (((first, second), pair.there), ((second, first), pair.back)):
            if timing is not None and timing.p50_us > 0:
                found.setdefault(way, []).append(pair.nbytes / timing.p50_us / 1e3)
    return {way: median(values) for way, values in found.items()}


def latencies(pairs: Sequence[Pair]) -> Value:
    """Return the latency in microseconds between two nodes, the median over launches.

    The latency is the same in both directions.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for pair in pairs:
        timing: SampleTimes | None = pair.latency
        if timing is not None:
            for way in (pair.nodes, pair.nodes[::-1]):
                found.setdefault((way[0], way[1]), []).append(timing.p50_us)
    return {way: median(values) for way, values in found.items()}


def _matrix(nodes: Sequence[int], values: Value) -> list[str]:
    found = ["#  node" + "".join(f"{node:>{WIDTH}}" for node in nodes)]
    for row in nodes:
        cells = ("." if row == column else number(values.get((row, column))) for column in nodes)
        found.append(f"{row:>7}" + "".join(cell.rjust(WIDTH) for cell in cells))
    return found
