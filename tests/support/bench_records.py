"""Records of benchmarks made by hand, for tests of what is made of them."""

from collections.abc import Sequence
from typing import Any

from muster.collectives_bench.catalog import OPERATIONS, actual_bytes
from muster.collectives_bench.records import (
    BenchCell,
    BenchHeader,
    Block,
    ForeignLoad,
    HostFacts,
    SampleTimes,
    WorldRecord,
)


def a_world(ranks: int = 2, *, nodes: int = 1, backend: str = "gloo") -> WorldRecord:
    """Return a world of so many ranks in all, on GPUs with NCCL."""
    device = "cuda" if backend == "nccl" else "cpu"
    return WorldRecord.model_validate(
        {"nodes": nodes, "ranks_per_node": ranks // nodes, "ranks": ranks, "backend": backend, "device": device}
    )


def a_cell(operation: str = "all_reduce", asked_bytes: int = 2**20, **more: Any) -> BenchCell:
    """Return a cell of fp32, in place where that is the default."""
    given = {"operation": operation, "dtype": "fp32", "asked_bytes": asked_bytes, "place": "in", **more}
    return BenchCell.model_validate(given)


def a_block(
    samples_us: Sequence[float] | None = (100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 106.0),
    *,
    launch: int = 0,
    world: WorldRecord | None = None,
    cell: BenchCell | None = None,
    foreign: float | None = None,
    **more: Any,
) -> Block:
    """Return a block; without samples it has no times. Launches follow one another by a second."""
    world, cell = world or a_world(), cell or a_cell()
    nbytes = actual_bytes(OPERATIONS[cell.operation], cell.asked_bytes, world.ranks, cell.dtype)
    given: dict[str, Any] = {
        "launch": launch,
        "world": world,
        "cell": cell,
        "nbytes": nbytes,
        "state": "ok",
        "time": 1000.0 + launch,
        "latency": SampleTimes.of(samples_us) if samples_us else None,
        "samples_us": list(samples_us or ()),
        "load": None if foreign is None else ForeignLoad(foreign=foreign, steal=0.0, host="node0"),
        **more,
    }
    return Block(**given)


def a_header(*hosts: HostFacts, world: WorldRecord | None = None, **more: Any) -> BenchHeader:
    """Return a run's header."""
    given: dict[str, Any] = {
        "name": "test",
        "world": world or a_world(),
        "settings": {},
        "torch": "2.13",
        "time": 999.0,
    }
    return BenchHeader(**{**given, "hosts": list(hosts) or [a_host()], **more})


def a_host(node: int = 0, **more: Any) -> HostFacts:
    """Return a host in order: nothing about it changes numbers."""
    given: dict[str, Any] = {"node": node, "host": f"node{node}", "cores": 8, "ranks": 2, "congestion_control": "cubic"}
    return HostFacts(**{**given, **more})
