"""Every pair of nodes, measured: latency, and bandwidth in either direction. One rank of each node plays, local rank 0.

    repetition   all rounds, in another order each time        so that what drifts is seen as spread
    round        disjoint pairs, all at once                   no node is in two: on a switch they are apart
    pair         8 bytes to and fro: latency = half the time
                 n bytes several times there, then several times back, each answered by 8: one way = time - latency

The first message of each way is not counted: it warms up what is warm later, and it takes what a shaped link lets pass
for nothing after a pause.

Who sends takes the time, so no clocks are compared. All ranks wait for each other between rounds: no wait is longer
than a round.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist

from collectives_bench.ranks.company import Company
from collectives_bench.ranks.sampling import Voices
from collectives_bench.records import Pair, Timing
from collectives_bench.results.stats import median, timing
from collectives_bench.rounds import orders
from collectives_bench.settings import BenchSettings
from ddp.primitives import begin, wait

REPETITIONS: Final = 3
PINGS: Final = 20  # of a visit; after some that warm up
WARM_PINGS: Final = 3
LEAST_MESSAGES: Final = 2  # of a visit, each way
MOST_MESSAGES: Final = 30
NOTE_BYTES: Final = 8
US: Final = 1e6
LEAST_US: Final = 0.01  # a time that is less than the latency is nothing but noise
DIGITS: Final = 3
FIELDS: Final = tuple(Timing.model_fields)


def play_pairs(
    company: Company, settings: BenchSettings, *, launch: int, group: dist.ProcessGroup, voices: Voices
) -> list[Pair]:
    """Measure every pair of nodes in one launch; all ranks call it, and all get the same records.

    `voices` is heard beside `group`, which is measured.

    Raises:
        RuntimeError: a pair could not be measured; it is named.
    """
    env = company.env
    told = [(round(node), round(local)) for node, local in voices.gather([env.node_rank, env.local_rank])]
    players = {node: rank for rank, (node, local) in enumerate(told) if local == 0}
    nodes = sorted(players)
    on_gpu, nbytes = company.world.backend == "nccl", settings.pair_bytes
    if env.rank not in players.values():
        settings = settings.model_copy(update={"pair_bytes": 1})  # it only waits
    here = _Player(settings, group, voices, company.device if on_gpu else torch.device("cpu"))
    for once in orders(len(nodes), REPETITIONS, f"{settings.seed}/{launch}"):
        for pairs in once:
            voices.barrier()
            for one, other in ((nodes[one], nodes[other]) for one, other in pairs):
                if env.rank in (players[one], players[other]):
                    here.meet((one, other), players, leads=env.rank == players[one])
    heard = _gather(here, nodes, voices)
    names = {each.node: each.host for each in company.hosts}
    found = []
    for one, other in ((one, other) for one in nodes for other in nodes if one < other):
        latency, there = heard[players[one]][other]
        _, back = heard[players[other]][one]
        found.append(
            Pair(
                launch=launch,
                world=company.world,
                nodes=(one, other),
                hosts=(names.get(one, f"node {one}"), names.get(other, f"node {other}")),
                nbytes=nbytes,
                latency=latency,
                there=there,
                back=back,
                time=time.time(),
            )
        )
    return found


@dataclass
class _Player:
    """The rank that plays for its node, and what it has measured: microseconds, by the node at the other end."""

    settings: BenchSettings
    group: dist.ProcessGroup
    voices: Voices
    device: torch.device
    latency_us: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent_us: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        """Make the messages once: memory that is new costs time of its own."""
        self.note = torch.zeros(NOTE_BYTES, dtype=torch.uint8, device=self.device)
        self.load = torch.zeros(self.settings.pair_bytes, dtype=torch.uint8, device=self.device)
        self.terms = torch.zeros(2, dtype=torch.float64, device=self.device)

    def meet(self, nodes: tuple[int, int], players: dict[int, int], *, leads: bool) -> None:
        """Measure one pair, as the first of the two or as the second."""
        other = nodes[1] if leads else nodes[0]
        try:
            self._visit(other, players[other], leads=leads)
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
        # There its first message has gone already; back it has not.
        for uncounted, mine in ((0, leads), (1, not leads)):
            for number in range(uncounted + int(messages)):
                if mine:
                    took_us = self._ask(self.load, peer) - latency_us
                    self.sent_us[node] += [max(took_us, LEAST_US)] if number >= uncounted else []
                else:
                    self._answer(self.load, peer)

    def _ask(self, message: torch.Tensor, peer: int) -> float:
        """Send a message and wait for the answer; return the microseconds of both."""
        self.voices.beat()
        started = time.perf_counter()
        self._send(message, peer)
        self._receive(self.note, peer)
        return (time.perf_counter() - started) * US

    def _answer(self, message: torch.Tensor, peer: int) -> None:
        self.voices.beat()
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


def _gather(here: _Player, nodes: Sequence[int], voices: Voices) -> list[dict[int, tuple[Timing | None, ...]]]:
    """Return what every rank has measured, by rank and by the node at the other end: latency, and what it sent."""
    own: list[float] = []
    for node in nodes:
        for samples in (here.latency_us.get(node), here.sent_us.get(node)):
            found = timing([round(each, DIGITS) for each in samples]) if samples else None
            own += [float(getattr(found, name)) if found is not None else 0.0 for name in FIELDS]
    width = len(FIELDS)
    heard = []
    for row in voices.gather(own):
        timings = [_timing(row[start : start + width]) for start in range(0, len(row), width)]
        heard.append({node: tuple(timings[2 * place : 2 * place + 2]) for place, node in enumerate(nodes)})
    return heard


def _timing(values: Sequence[float]) -> Timing | None:
    named = dict(zip(FIELDS, values, strict=True))
    count = int(named.pop("n"))
    return Timing(n=count, **named) if count else None
