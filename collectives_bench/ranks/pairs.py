"""Measure every pair of nodes: latency, and bandwidth in both directions. Local rank 0 of each node takes part.

    repetition   all rounds, in another order each time        so that drift shows as spread
    round        disjoint pairs, all at the same time          each node is in one pair only
    pair         8 bytes back and forth: latency = half the time
                 n bytes several times there, then several times back, each answered by 8 bytes: time - latency

The first message of each direction is not counted, because it warms up and uses the burst that a shaped link allows
after a pause. The sender measures the time, so no clocks are compared. All ranks wait for each other between rounds, so
that no wait is longer than a round. They also exchange their times between rounds, so that a failing node loses only
its current round.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from muster.collectives_bench.ranks.bench_ranks import BenchRanks
from muster.collectives_bench.ranks.sampling import ControlGroup
from muster.collectives_bench.records import Pair, SampleTimes
from muster.collectives_bench.rounds import orders
from muster.collectives_bench.settings import BenchSettings
from muster.ddp.primitives import begin, wait

REPETITIONS: Final = 3
PINGS: Final = 20  # number per pair, after the warm-up
WARM_PINGS: Final = 3
LEAST_MESSAGES: Final = 2  # number per pair, in each direction
MOST_MESSAGES: Final = 30
NOTE_BYTES: Final = 8
US: Final = 1e6
LEAST_US: Final = 0.01  # a transfer time below the latency is only noise
DIGITS: Final = 3

Link = tuple[int, int]  # two nodes


@dataclass(frozen=True)
class PairTests:
    """The measurement of all pairs of nodes, on one rank.

    Messages over `group` are measured, messages over `control_group` are not.
    """

    bench_ranks: BenchRanks
    settings: BenchSettings
    group: dist.ProcessGroup
    control_group: ControlGroup

    def play(
        self,
        launch: int,
        *,
        without: Collection[Sequence[int]] = (),
        meets: Callable[[Link | None], None] = lambda _: None,
    ) -> Iterator[list[Pair]]:
        """Measure every pair except those in `without`. After each round, yield its pairs with all samples so far.

        All ranks call this and get the same records. `meets` is called with this rank's next pair, or None if it rests.

        Raises:
            RuntimeError: if a pair could not be measured. The message names the pair.
        """
        env, settings = self.bench_ranks.env, self.settings
        told = [
            (round(node), round(local)) for node, local in self.control_group.gather([env.node_rank, env.local_rank])
        ]
        rank_of_node = {node: rank for rank, (node, local) in enumerate(told) if local == 0}
        nodes = sorted(rank_of_node)
        on_gpu = self.bench_ranks.world.backend == "nccl"
        if env.rank not in rank_of_node.values():
            settings = settings.model_copy(update={"pair_bytes": 1})  # this rank only waits
        here = _PairRank(
            settings, self.group, self.control_group, self.bench_ranks.device if on_gpu else torch.device("cpu")
        )
        left_out = {tuple(pair) for pair in without}
        for once in orders(len(nodes), REPETITIONS, f"{settings.seed}/{launch}"):
            for rank_hosts in once:
                pairs = [
                    pair for pair in ((nodes[one], nodes[other]) for one, other in rank_hosts) if pair not in left_out
                ]
                mine = next(
                    (pair for pair in pairs if env.rank in (rank_of_node[pair[0]], rank_of_node[pair[1]])), None
                )
                meets(mine)
                self.control_group.barrier()
                if mine is not None:
                    here.meet(mine, rank_of_node, leads=env.rank == rank_of_node[mine[0]])
                heard = [_timings(each) for each in self.control_group.told(_measured(here, mine))]
                yield [
                    self._record(launch, pair, heard[rank_of_node[pair[0]]], heard[rank_of_node[pair[1]]])
                    for pair in pairs
                ]

    def _record(
        self, launch: int, pair: Link, first: Sequence[SampleTimes | None], second: Sequence[SampleTimes | None]
    ) -> Pair:
        times = {"latency": first[0], "there": first[1], "back": second[1]}
        return pair_record(self.bench_ranks, launch, pair, self.settings.pair_bytes, **times)


def pair_record(bench_ranks: BenchRanks, launch: int, pair: Link, nbytes: int, **found: Any) -> Pair:
    """Return the record of two nodes in a launch, with its measurements."""
    names = {each.node: each.host for each in bench_ranks.hosts}
    one, other = (names.get(node, f"node {node}") for node in pair)
    return Pair(
        launch=launch, world=bench_ranks.world, nodes=pair, hosts=(one, other), nbytes=nbytes, time=time.time(), **found
    )


@dataclass
class _PairRank:
    """The rank that measures for its node. It stores its times in microseconds, by the other node of the pair."""

    settings: BenchSettings
    group: dist.ProcessGroup
    control_group: ControlGroup
    device: torch.device
    latency_us: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent_us: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        """Allocate the messages once, because new memory costs time."""
        self.note = torch.zeros(NOTE_BYTES, dtype=torch.uint8, device=self.device)
        self.load = torch.zeros(self.settings.pair_bytes, dtype=torch.uint8, device=self.device)
        self.terms = torch.zeros(2, dtype=torch.float64, device=self.device)

    def meet(self, nodes: tuple[int, int], rank_of_node: dict[int, int], *, leads: bool) -> None:
        """Measure one pair. `leads` is True on the pair's first node."""
        other = nodes[1] if leads else nodes[0]
        try:
            self._visit(other, rank_of_node[other], leads=leads)
        except RuntimeError as error:
            raise RuntimeError(f"pair of nodes {nodes[0]} and {nodes[1]}: {error}") from error

    def _visit(self, node: int, peer: int, *, leads: bool) -> None:
        if leads:
            pings = [self._ask(self.note, peer) / 2 for _ in range(WARM_PINGS + PINGS)][WARM_PINGS:]
            self.latency_us[node] += pings
            warm_us = self._ask(self.load, peer)
            visit_s = self.settings.block_s / REPETITIONS
            count = min(max(int(visit_s * US / (2 * warm_us)), LEAST_MESSAGES), MOST_MESSAGES)
            self.terms.copy_(torch.tensor([count, median(pings)]))
            self._send(self.terms, peer)
        else:
            for _ in range(WARM_PINGS + PINGS):
                self._answer(self.note, peer)
            self._answer(self.load, peer)
            self._receive(self.terms, peer)
        messages, latency_us = self.terms.tolist()
        # In this direction, the first message, which is not counted, has already been sent.
        for uncounted, mine in ((0, leads), (1, not leads)):
            for number in range(uncounted + int(messages)):
                if mine:
                    took_us = self._ask(self.load, peer) - latency_us
                    self.sent_us[node] += [max(took_us, LEAST_US)] if number >= uncounted else []
                else:
                    self._answer(self.load, peer)

    def _ask(self, message: torch.Tensor, peer: int) -> float:
        """Send a message and wait for the reply; return the time of both in microseconds."""
        self.control_group.beat()
        started = time.perf_counter()
        self._send(message, peer)
        self._receive(self.note, peer)
        return (time.perf_counter() - started) * US

    def _answer(self, message: torch.Tensor, peer: int) -> None:
        self.control_group.beat()
        self._receive(message, peer)
        self._send(self.note, peer)

    def _send(self, message: torch.Tensor, peer: int) -> None:
        wait(begin(self.group, sends=[(message, peer)]))
        self._finish()

    def _receive(self, message: torch.Tensor, peer: int) -> None:
        wait(begin(self.group, receives=[(message, peer)]))
        self._finish()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _measured(here: _PairRank, pair: Link | None) -> list[dict[str, Any] | None]:
    """Return a rank's measurements with its partner of this round: latency and transfers."""
    found = []
    for measured in (here.latency_us, here.sent_us):
        samples = [each for node in pair or () for each in measured.get(node, ())]  # no partner if this rank rests
        found.append(SampleTimes.of([round(each, DIGITS) for each in samples]).model_dump() if samples else None)
    return found


def _timings(told: Sequence[dict[str, Any] | None]) -> list[SampleTimes | None]:
    return [None if each is None else SampleTimes(**each) for each in told]
