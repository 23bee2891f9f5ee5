"""The schedules: each a row of one table, a pure function of ranks, micro-batches and chunks.

    name         stages  backward  in flight (activations of a rank)   idle share of a step, stages alike, B = 2 F
    model        p       whole     1                                   (p - 1) / p
    gpipe        p       whole     m                                   (p - 1) / (m + p - 1)
    1f1b         p       whole     min(p - rank, m)                    (p - 1) / (m + p - 1)
    interleaved  v p     whole     more than 1f1b, of smaller stages   (p - 1) / (v m + p - 1), from m = p on
    zb1p         p       split     min(p, m)                           (p - 1) / (3 m + p - 1), from m = p on
    zbv          2 p     split     2 p, of stages half as large        (p - 1) / (6 m + p - 1), from m = 2 p on

p ranks, m micro-batches, v chunks a rank. What zbv idles is what its last rank begins later than its first: p - 1
forwards of half a stage. Steps of ours end on all ranks at once; the paper, which counts a rank's own time only, from
its first action to its last, calls that zero. Backwards of a stage, and W of those that are split, come in the order
of micro-batches in every schedule, so that sums of gradients have the bits that a loop over micro-batches gives.
"""

from collections.abc import Callable
from dataclasses import dataclass

from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.zero_bubble import Orders, one_chunk, two_chunks


@dataclass(frozen=True)
class Row:
    """One schedule: how many stages a rank has (None: as many as asked), where they are, and what ranks do."""

    about: str
    chunks: int | None
    rank_of: Callable[[int, int], tuple[int, ...]]
    orders: Callable[[tuple[int, ...], int, int, Costs], Orders]
    bubble: Callable[[int, int, int], float]  # of ranks, micro-batches, chunks
    splits_backward: bool = False

    def stages(self, ranks: int, chunks: int = 2) -> int:
        """Count the stages that a model is cut into."""
        return ranks * (self.chunks or chunks)

    def actions(self, ranks: int, microbatches: int, chunks: int = 2) -> int:
        """Count what all ranks do in a step."""
        return self.stages(ranks, chunks) * microbatches * (3 if self.splits_backward else 2)


def schedule(name: str, ranks: int, microbatches: int, *, chunks: int = 2, costs: Costs | None = None) -> Schedule:
    """Return the table of a schedule; the same arguments give the same table on every rank.

    `chunks` is the number of stages on each rank, for `interleaved`; the others have their own. `costs` are what zb1p
    and zbv are fitted to (one second each if not given); the order of the others does not depend on them. There may be
    fewer micro-batches than ranks.

    Raises:
        ValueError: No such schedule, fewer than one rank, micro-batch or chunk, or costs for other stages.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is not known, wanted one of: {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ValueError(f"schedule {name}: {what} must be at least 1, got {number}")
    row = SCHEDULES[name]
    rank_of = row.rank_of(ranks, row.chunks or chunks)
    costs = costs or Costs()
    costs.require(len(rank_of))
    return Schedule(name, microbatches, rank_of, row.orders(rank_of, ranks, microbatches, costs))


def round_robin(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stage s on rank s % ranks."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def vee(ranks: int, _chunks: int) -> tuple[int, ...]:
    """Place stages down the ranks and up again: rank r has stages r and 2 ranks - 1 - r, the last rank both inner."""
    return (*range(ranks), *reversed(range(ranks)))


def _model(_rank_of: tuple[int, ...], ranks: int, microbatches: int, _costs: Costs) -> Orders:
    return tuple(
        tuple(Action(kind, stage, index) for index in range(microbatches) for kind in ("F", "B"))
        for stage in range(ranks)
    )


def _gpipe(_rank_of: tuple[int, ...], ranks: int, microbatches: int, _costs: Costs) -> Orders:
    return tuple(
        tuple(Action(kind, stage, index) for kind in ("F", "B") for index in range(microbatches))
        for stage in range(ranks)
    )


def _1f1b(_rank_of: tuple[int, ...], ranks: int, microbatches: int, _costs: Costs) -> Orders:
    """PipeDream-flush (Narayanan et al. 2021): a rank runs as many forwards ahead as there are ranks after it."""
    rows = []
    for stage in range(ranks):
        forwards = [Action("F", stage, index) for index in range(microbatches)]
        backwards = [Action("B", stage, index) for index in range(microbatches)]
        rows.append(_alternated(forwards, backwards, ahead=ranks - stage - 1))
    return tuple(rows)


def _interleaved(rank_of: tuple[int, ...], ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Megatron's order (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters").

    Micro-batches go in rounds through a rank's chunks, as many in a round as there are ranks: when the last of a round
    is through, the first is back from the ring. Where ranks do not divide micro-batches, rounds are larger by as little
    as can be, the larger ones first, since a round that is smaller than the ring would wait for it.
    """
    chunks = len(rank_of) // ranks
    if chunks == 1:
        return _1f1b(rank_of, ranks, microbatches, costs)
    count = max(1, microbatches // ranks)
    small, more = divmod(microbatches, count)
    sizes = [small + (index < more) for index in range(count)]
    begins = [sum(sizes[:index]) for index in range(count)]
    rounds = [range(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    rows = []
    for rank in range(ranks):
        stages = range(rank, len(rank_of), ranks)
        forwards = [Action("F", stage, index) for part in rounds for stage in stages for index in part]
        backwards = [Action("B", stage, index) for part in rounds for stage in reversed(stages) for index in part]
        rows.append(_alternated(forwards, backwards, ahead=2 * (ranks - rank - 1) + (chunks - 1) * sizes[0]))
    return tuple(rows)


def _alternated(forwards: list[Action], backwards: list[Action], *, ahead: int) -> tuple[Action, ...]:
    """Run some forwards ahead, then one forward and one backward at a time, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    left = backwards[len(forwards) - ahead :]
    return (*forwards[:ahead], *(action for pair in pairs for action in pair), *left)


def _bubble_of_model(ranks: int, _microbatches: int, _chunks: int) -> float:
    return (ranks - 1) / ranks


def _bubble_of_one_stage(ranks: int, microbatches: int, _chunks: int) -> float:
    return (ranks - 1) / (microbatches + ranks - 1)


def _bubble_of_interleaved(ranks: int, microbatches: int, chunks: int) -> float:
    """With fewer micro-batches than ranks, every chunk but the last waits until the first is back from the ring."""
    idle = ranks - 1 + (chunks - 1) * max(0, ranks - microbatches)
    return idle / (chunks * microbatches + idle)


def _bubble_of_zb1p(ranks: int, microbatches: int, _chunks: int) -> float:
    """With fewer micro-batches than ranks, the way to the last stage and back is longer than a rank's work."""
    idle = ranks - 1 + max(0, ranks - microbatches)
    return idle / (3 * microbatches + idle)


def _bubble_of_zbv(ranks: int, microbatches: int, _chunks: int) -> float:
    """Of the way down the V, up and back, and a rank's work after the first micro-batch is there, the longer counts."""
    makespan = max(6 * microbatches + ranks - 1, 4 * ranks + 2 * microbatches - 1)
    return 1 - 6 * microbatches / makespan


SCHEDULES = {
    "model": Row("one micro-batch at a time, through all stages and back", 1, round_robin, _model, _bubble_of_model),
    "gpipe": Row("all forwards, then all backwards", 1, round_robin, _gpipe, _bubble_of_one_stage),
    "1f1b": Row(
        "one forward, one backward: memory of as many micro-batches as stages",
        1,
        round_robin,
        _1f1b,
        _bubble_of_one_stage,
    ),
    "interleaved": Row(
        "1f1b over several smaller stages a rank", None, round_robin, _interleaved, _bubble_of_interleaved
    ),
    "zb1p": Row(
        "1f1b whose weight gradients fill the bubble", 1, round_robin, one_chunk, _bubble_of_zb1p, splits_backward=True
    ),
    "zbv": Row(
        "two stages a rank in a V, weight gradients fill the bubble",
        2,
        vee,
        two_chunks,
        _bubble_of_zbv,
        splits_backward=True,
    ),
}
