"""What the price of a split depends on: a job's ranks and machines, its measured times, and its network. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from muster.collectives_bench.cost.advice.measured import LayerTimes
from muster.collectives_bench.cost.advice.plans import SplitPlan
from muster.collectives_bench.cost.exposed import Network
from muster.collectives_bench.cost.load import RankLoad
from muster.collectives_bench.cost.predicting import Prediction

Made = TypeVar("Made")


@dataclass(frozen=True)
class JobSite:
    """A job's ranks: the load, the measured times, the network, and how ranks are placed on machines."""

    load: RankLoad
    times: LayerTimes
    network: Network
    nodes: int
    sharing: int  # ranks that share one machine
    options: tuple[str, ...] = ()
    cpu_s_per_byte: float = 0.0  # of a message between nodes
    paces: tuple[float, float] = (1.0, 1.0)  # of ranks that share cores, without and with a pipeline: `calibrated`
    records: bool = False  # the job records steps as CUDA graphs where its split allows it
    parts: dict[object, Any] = field(default_factory=dict, compare=False)  # parts of the model, by the way it is cut

    def kept(self, key: object, make: Callable[[], Made]) -> Made:
        """Return what `make` returned when it was first called with this key."""
        if key not in self.parts:
            self.parts[key] = make()
        found: Made = self.parts[key]
        return found

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.load.ranks

    @property
    def per_node(self) -> int:
        """The ranks of a node."""
        return -(-self.ranks // self.nodes)

    @cached_property
    def active(self) -> int:
        """The ranks that compute at the same time on one machine, if none waits."""
        return min(self.sharing, self.ranks)

    @cached_property
    def option_factor(self) -> float:
        """The factor by which options such as `compile` change the time of passes."""
        factor = 1.0
        for option in self.options:
            if option == "cuda_graph" and self.times.replays:
                continue  # `replays` has the times of recorded passes
            factor *= self.times.factor(option) or 1.0
        return factor

    def nodes_of(self, ranks: int, stride: int) -> int:
        """Return the number of nodes of a group with `ranks` ranks, each `stride` ranks from the next."""
        here = max(self.per_node // stride, 1) if stride < self.per_node else 1
        nodes = max(-(-ranks // here), 1)
        return nodes if ranks % nodes == 0 else ranks

    def groups_on_link(self, ranks: int, stride: int) -> int:
        """Return the number of such groups that use the link of a node at the same time; 1 within a node."""
        return min(stride, self.per_node) if self.nodes_of(ranks, stride) > 1 else 1

    def replays(self, plan: SplitPlan) -> bool:
        """Return whether ranks replay the plan's passes from CUDA graphs, so that they do not wait for the host."""
        return self.records and plan.is_recordable and bool(self.times.replays)

    def passes(self, plan: SplitPlan, samples: float, active: float) -> tuple[float, float]:
        """Return the seconds of a forward and a backward of `samples` samples, or of a slice of their sequences.

        Tensor ranks split every layer.
        """
        part = samples / plan.slices / plan.tensor
        forward, backward = self.times.pass_s(part, active, recorded=self.replays(plan))
        factor = self.option_factor * self.paces[bool(plan.schedule)]
        return forward * factor, backward * factor


class KnownNetwork:
    """A network that remembers its predictions."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.known: dict[object, Prediction] = {}

    def predict(self, operation: str, nbytes: float, **world: Any) -> Prediction:
        """Predict an exchange. Errors as for the network."""
        key = (operation, nbytes, *world.items())
        if key not in self.known:
            self.known[key] = self.network.predict(operation, nbytes, **world)
        return self.known[key]


class NoNetwork:
    """A network without costs, for processes of one machine, whose messages' CPU time is part of the actions."""

    def predict(self, *_: Any, **more: Any) -> Prediction:
        """Return 0 s."""
        return Prediction(0.0, 0.0, 0.0, "messages within a machine")


class GroupNetwork:
    """The network as one of several groups sees it, which share the links of their nodes."""

    def __init__(self, network: Network, nodes: int, groups: int) -> None:
        self.network, self.nodes, self.groups = network, nodes, groups

    def predict(self, operation: str, nbytes: float, *, ranks: int, nodes: int = 1, **more: Any) -> Prediction:
        """Predict an exchange, while the other groups make the same one."""
        spread = min(self.nodes, ranks)
        return self.network.predict(operation, nbytes * self.groups, ranks=ranks, nodes=spread, **more)
