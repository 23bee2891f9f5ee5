"""Results of a cluster whose constants are known: times by the formulas, with noise that is keyed and so repeats."""

import math
import random
from collections.abc import Callable, Mapping, Sequence

from muster.collectives_bench.catalog import OPERATIONS, actual_bytes
from muster.collectives_bench.cost.second import Constants
from muster.collectives_bench.records import Block, Cell, Header, HostFacts, Result, Timing, World

SIZES = tuple(2**power for power in range(14, 27, 2))  # 16 KB to 64 MB
OnOneHost = Constants(
    backend="gloo",
    device="cpu",
    dtype="fp32",
    network=False,
    base_s=3e-5,
    alpha_s=1.2e-4,
    beta_s=3e-10,
    gamma_s=1e-10,
    delta_s=2e-10,
    overhead_s=4e-5,
    host_s=2.7e-10,
    crowding=0.2,
    cores=2,
)
OnLinks = OnOneHost.model_copy(
    update={"network": True, "beta_s": 8e-9, "host_s": 2.5e-10, "overhead_s": 1e-5, "crowding": 0.0}
)


def world_of(ranks: int, *, nodes: int = 1, backend: str = "gloo") -> World:
    """Return a world with as many ranks on every node."""
    device = "cuda" if backend == "nccl" else "cpu"
    return World.model_validate(
        {"nodes": nodes, "ranks_per_node": ranks // nodes, "ranks": ranks, "backend": backend, "device": device}
    )


def timing(p50_us: float) -> Timing:
    """Return a distribution around a median."""
    low, high = 0.95 * p50_us, 1.05 * p50_us
    return Timing(
        n=20, min_us=low, p50_us=p50_us, p95_us=high, p99_us=high, max_us=high, mean_us=p50_us, low_us=low, high_us=high
    )


def block(operation: str, nbytes: int, world: World, us: float, *, launch: int = 0, dtype: str = "fp32") -> Block:
    """Return a good block."""
    cell = Cell(operation=operation, dtype=dtype, asked_bytes=nbytes, place=OPERATIONS[operation].places[0])
    return Block(
        launch=launch, world=world, cell=cell, nbytes=nbytes, state="ok", latency=timing(us), wrong=0, time=1.8e9
    )


def header(world: World, *, cores: int = 2) -> Header:
    """Return the header of a run with a host for each node."""
    hosts = [
        HostFacts(node=node, host=f"node{node}", cores=cores, ranks=world.ranks_per_node) for node in range(world.nodes)
    ]
    return Header(name="synthetic", world=world, settings={}, hosts=hosts, torch="2.13.0", time=1.8e9)


def drawn(
    truth: Constants,
    operations: Sequence[str],
    *,
    worlds: Sequence[int] = (2, 3, 4),
    noise: float = 0.03,
    sizes: Sequence[int] = SIZES,
    bend: Callable[[float], float] = lambda nbytes: 1.0,
    launches: int = 3,
) -> Result:
    """Return what a cluster with these constants would have measured; `bend` is how far a size lies from its line."""
    blocks = []
    found = [world_of(ranks, nodes=ranks if truth.network else 1) for ranks in worlds]
    for world in found:
        for operation in operations:
            for asked in sizes if OPERATIONS[operation].has_size else (0,):
                nbytes = actual_bytes(OPERATIONS[operation], asked, world.ranks, "fp32")
                seconds = truth.of(operation, nbytes, ranks=world.ranks, nodes=world.nodes) * bend(nbytes)
                for launch in range(launches):
                    draw = random.Random(f"{operation}/{world.ranks}/{nbytes}/{launch}")
                    us = seconds * 1e6 * math.exp(draw.gauss(0.0, noise))
                    blocks.append(block(operation, nbytes, world, us, launch=launch))
    return Result(headers=[header(world) for world in found], blocks=blocks)


def values(constants: Constants, names: Sequence[str]) -> Mapping[str, float]:
    """Return some constants by name."""
    return {name: getattr(constants, name) for name in names}
