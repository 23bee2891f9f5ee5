"""Results of a cluster whose constants are known: times by the formulas, with noise that is keyed and so repeats."""

import math
import random
from collections.abc import Callable, Sequence

from muster.collectives_bench.catalog import OPERATIONS, actual_bytes
from muster.collectives_bench.cost.constants import Constants
from muster.collectives_bench.records import BenchHeader, Block, Result, WorldRecord
from support.bench_records import a_block, a_cell, a_header, a_host, a_world

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


def block(operation: str, nbytes: int, world: WorldRecord, us: float, *, launch: int = 0) -> Block:
    """Return a good block."""
    cell = a_cell(operation, nbytes, place=OPERATIONS[operation].places[0])
    return a_block([us], launch=launch, world=world, cell=cell, nbytes=nbytes, time=1.8e9)


def header(world: WorldRecord) -> BenchHeader:
    """Return the header of a run with a host for each node."""
    hosts = [a_host(node, cores=2, ranks=world.ranks_per_node) for node in range(world.nodes)]
    return a_header(*hosts, name="synthetic", world=world, torch="2.13.0", time=1.8e9)


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
    found = [a_world(ranks, nodes=ranks if truth.network else 1) for ranks in worlds]
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
