"""The constants of a cluster, which the formulas use for all operations and worlds. Pure.

`collectives_bench/cost/shared.py` fits them. The constants make it possible to predict worlds and operations that were
not measured.
"""

import math
from typing import Final

from pydantic import Field

from muster.collectives_bench.cost.curves import Errors
from muster.collectives_bench.cost.formulas import Cost, cost
from muster.jobs.spec.strict import Strict

UNSURE: Final = (0.5, 2.0)  # interval of predictions if the constants were not tested on held-out worlds


ACTIVE: Final = {"ping_pong": 2.0}  # number of busy ranks in operations in which most ranks are idle


class Constants(Strict):
    """The cost of a message and of a byte (see `formulas`): between nodes if `network` is True, else on one node."""

    backend: str
    device: str
    dtype: str
    network: bool
    one_host: bool = False  # True: all nodes are simulated on one host
    base_s: float = 0.0
    alpha_s: float = 0.0
    beta_s: float = 0.0
    rank_s: float = 0.0  # seconds per byte that a rank sends or receives
    gamma_s: float = 0.0
    delta_s: float = 0.0
    overhead_s: float = 0.0
    host_s: float = 0.0  # 1 / W in the formulas: seconds per byte that a host's ranks send
    crowding: float = 0.0  # factor by which the time of a host's work grows with each additional rank per core
    cores: int = Field(1, ge=1)  # number of cores of a host
    worlds: list[int] = Field(default_factory=list)  # numbers of ranks in the fitted worlds; empty if not fitted
    operations: list[str] = Field(default_factory=list)  # the fitted operations
    sizes: tuple[int, int] = (0, 0)  # the smallest and the largest fitted size, in bytes
    low: float = UNSURE[0]
    high: float = UNSURE[1]
    held_out: Errors | None = None  # errors on worlds that were held out of the fit

    def seconds(self, counts: Cost, ranks_here: float) -> float:
        """Return the seconds of an exchange with these counts, with `ranks_here` ranks on a host."""
        links = counts.steps * self.alpha_s + counts.link_bytes * self.beta_s
        own = counts.rank_bytes * self.rank_s + counts.reduced_bytes * self.gamma_s + counts.copied_bytes * self.delta_s
        hosts = counts.host_messages * self.overhead_s + counts.host_bytes * self.host_s
        hosts += (counts.host_reduced * self.gamma_s + counts.host_copied * self.delta_s) / self.cores
        crowd = 1 + self.crowding * max(ranks_here / self.cores - 1, 0.0)
        return self.base_s + max(links + own, hosts * crowd)

    def of(self, operation: str, nbytes: float, *, ranks: int, nodes: int) -> float:
        """Return the seconds of an operation."""
        hosts = 1 if self.one_host else nodes
        here = min(ranks / hosts, ACTIVE.get(operation, math.inf))
        return self.seconds(cost(operation, nbytes, ranks=ranks, nodes=hosts, backend=self.backend), here)
