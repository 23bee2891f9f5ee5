"""Results that were never measured: records as ranks write them, with times that a formula gives."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.collectives_bench.catalog import OPERATIONS, actual_bytes
from muster.collectives_bench.plan import cells_of, order_of
from muster.collectives_bench.records import (
    BenchCell,
    BenchHeader,
    Block,
    ForeignLoad,
    Pair,
    Result,
    SampleTimes,
    WireBytes,
    WorldRecord,
)
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.files import append_lines
from muster.jobs.measuring.recorded import End
from support.bench_records import a_host, a_world


def settings(**values: Any) -> BenchSettings:
    return BenchSettings.model_validate({"operation": ["all_reduce"], "sizes": ["1M", "4M"], "launches": 3, **values})


def world(nodes: int = 2, ranks_per_node: int = 1, backend: str = "gloo") -> WorldRecord:
    return a_world(nodes * ranks_per_node, nodes=nodes, backend=backend)


def timing(p50_us: float, n: int = 20) -> SampleTimes:
    around = {"min_us": 0.9, "p50_us": 1.0, "p95_us": 1.2, "p99_us": 1.5, "max_us": 2.0, "mean_us": 1.05}
    values = {name: factor * p50_us for name, factor in around.items()}
    return SampleTimes(n=n, low_us=0.98 * p50_us, high_us=1.02 * p50_us, **values)


def header(of: WorldRecord, asked: BenchSettings, name: str = "demo") -> BenchHeader:
    facts = {"cpu": "EPYC", "memory_bytes": 8 << 30, "kernel": "6.1", "interface": "eth0", "mtu": 1500, "cores": 2}
    hosts = [a_host(node, host=f"n{node}", ranks=of.ranks_per_node, **facts) for node in range(of.nodes)]
    return BenchHeader(name=name, world=of, settings=asked, hosts=hosts, torch="2.13.0", init_s=0.04, time=1.0)


def block(of: WorldRecord, cell: BenchCell, launch: int = 0, **changes: Any) -> Block:
    """One cell in one launch: 100 us and a microsecond for each KB, 1 % more with every launch."""
    nbytes = actual_bytes(OPERATIONS[cell.operation], cell.asked_bytes, of.ranks, cell.dtype)
    p50_us = (100.0 + nbytes / 1e3) * (1 + launch / 100)
    values: dict[str, Any] = {
        "launch": launch,
        "world": of,
        "cell": cell,
        "nbytes": nbytes,
        "state": "ok",
        "latency": timing(p50_us),
        "throughput_us": 0.9 * p50_us,
        "wrong": 0,
        "load": ForeignLoad(foreign=0.01, steal=0.0),
        "time": 10.0 + launch,
    }
    if changes.get("state", "ok") not in ("ok", "wrong"):
        values |= {"latency": None, "throughput_us": None, "wrong": None}
    return Block(**{**values, **changes})


def result(asked: BenchSettings | None = None, worlds: Sequence[WorldRecord] = (), slower: float = 1.0) -> Result:
    """A whole result in the worlds; every time `slower` times as long."""
    asked, worlds = asked or settings(), worlds or [world()]
    blocks = []
    for of in worlds:
        for launch in range(asked.launches):
            cells = cells_of(asked, of.ranks)
            for index in order_of(cells, launch, asked.seed):
                made = block(of, cells[index], launch)
                blocks.append(made.model_copy(update={"latency": timing(made.latency.p50_us * slower)}))
    return Result(headers=[header(of, asked) for of in worlds], blocks=blocks)


def wire(sent: float, known: float, best: float) -> WireBytes:
    return WireBytes(interfaces=["eth0"], calls=4, sent_bytes=sent, known_bytes=known, best_bytes=best)


def pairs(nodes: int = 4, *, slow_node: int | None = None, launches: int = 3) -> list[Pair]:
    """Every pair of nodes: 1 GB/s and 50 us, a quarter of that for a slow node; a little noise."""
    draw, made = random.Random(1), []
    for launch in range(launches):
        for first in range(nodes):
            for second in range(first + 1, nodes):
                slower = (4.0 if slow_node in (first, second) else 1.0) * draw.uniform(1.0, 1.02)
                there, back = timing(4194.304 * slower), timing(4194.304 * slower)
                made.append(
                    Pair(
                        launch=launch,
                        world=world(nodes),
                        nodes=(first, second),
                        hosts=(f"n{first}", f"n{second}"),
                        nbytes=4 << 20,
                        latency=timing(50.0 * slower),
                        there=there,
                        back=back,
                        time=10.0 + launch,
                    )
                )
    return made


def write_lines(path: Path, measured: Result, *, end: bool = True) -> None:
    """Write a result as ranks do, a record a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [*measured.headers, *measured.blocks, *measured.pairs]
    append_lines(path, [record.model_dump(mode="json") for record in records])
    if end:
        append_lines(path, [End(seconds=1.0, time=20.0).model_dump(mode="json")])
