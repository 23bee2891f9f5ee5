"""The table of schedules: each row is a pure function of ranks, micro-batches and chunks.

    name         stages  backward  activations in flight on a rank     idle share of a step, equal stages, B = 2 F
    model        p       whole     1                                   (p - 1) / p
    gpipe        p       whole     m                                   (p - 1) / (m + p - 1)
    1f1b         p       whole     min(p - rank, m)                    (p - 1) / (m + p - 1)
    interleaved  v p     whole     more than 1f1b, of smaller stages   (p - 1) / (v m + p - 1), for m >= p
    zb1p         p       split     min(p, m)                           (p - 1) / (3 m + p - 1), for m >= p
    zbv          2 p     split     2 p, of stages half as large        (p - 1) / (6 m + p - 1), for m >= 2 p
    terapipe     p       whole     m s slices                          (p - 1) / (m s + p - 1), equal slices

p ranks, m micro-batches, v chunks per rank, s slices of a sequence. The idle time of zbv is the delay between the
starts of its first and last rank: p - 1 forwards of half a stage. Our steps end on all ranks at the same time. The
paper counts each rank's time from its own first action to its own last one, so its idle time is zero. In every
schedule, a stage runs its backwards (and its W, if split) in the order of micro-batches, so that sums of gradients have
the same bits as in a loop over micro-batches. Within a micro-batch, the backwards of the slices run from the last slice
to the first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.zero_bubble import Orders, one_chunk, two_chunks

SLICES: Final = 4  # of a sequence, if their lengths are not given


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule: the number of stages per rank (`chunks`, if fixed), their placement, and the order of actions."""

    about: str
    chunks: int | None
    rank_of: Callable[[int, int], tuple[int, ...]]
    orders: Callable[[tuple[int, ...], int, int, Costs], Orders]
    bubble: Callable[[int, int, int], float]  # (ranks, micro-batches, chunks) -> idle share
    splits_backward: bool = False
    slices_tokens: bool = False

    def stages(self, ranks: int, chunks: int = 2) -> int:
        """Return the number of stages that the model is cut into."""
        return ranks * (self.chunks or chunks)

    def actions(self, ranks: int, microbatches: int, chunks: int = 2) -> int:
        """Return the number of actions of all ranks in a step."""
        return self.stages(ranks, chunks) * microbatches * (3 if self.splits_backward else 2)


def schedule(
    name: str, ranks: int, microbatches: int, *, chunks: int = 2, costs: Costs | None = None, slices: int = 1
) -> Schedule:
    """Return the table of a schedule. The same arguments give the same table on every rank.

    `chunks` is the number of stages per rank for `interleaved`; the other schedules have a fixed number. zb1p and zbv
    are optimized for `costs` (default: one second each); the other schedules ignore `costs`. There may be fewer
    micro-batches than ranks. `slices` is the number of slices of a sequence for `terapipe`.

    Raises:
        ValueError: If the name is unknown, ranks, micro-batches, chunks or slices are less than 1, the number of costs
            does not match the stages, or the schedule does not slice sequences and `slices` is above 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; expected one of: {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks), ("slices", slices)):
        if number < 1:
            raise ValueError(f"schedule {name}: {what} must be at least 1, got {number}")
    row = SCHEDULES[name]
    if slices > 1 and not row.slices_tokens:
        raise ValueError(f"schedule {name}: slices must be 1, got {slices}; only terapipe slices sequences")
    rank_of = row.rank_of(ranks, row.chunks or chunks)
    costs = costs or Costs()
    costs.require(len(rank_of))
    made = Schedule(name, count := microbatches * slices, rank_of, row.orders(rank_of, ranks, count, costs), slices)
    return made if slices == 1 else replace(made, actions=tuple(_later_first(each, made) for each in made.actions))


def round_robin(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stage s on rank s % ranks."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def vee(ranks: int, _chunks: int) -> tuple[int, ...]:
    """Place stages down the ranks and up again: rank r holds stages r and 2 ranks - 1 - r."""
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
    """Build PipeDream-flush (Narayanan et al. 2021): a rank runs one forward in advance for each rank after it."""
    rows = []
    for stage in range(ranks):
        forwards = [Action("F", stage, index) for index in range(microbatches)]
        backwards = [Action("B", stage, index) for index in range(microbatches)]
        rows.append(_alternated(forwards, backwards, ahead=ranks - stage - 1))
    return tuple(rows)


def _interleaved(rank_of: tuple[int, ...], ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Build Megatron's interleaved schedule (Narayanan et al. 2021, "Efficient large-scale language model training on
    GPU clusters").

    Micro-batches pass through a rank's chunks in rounds. A round has at least as many micro-batches as there are ranks.
    So when the last micro-batch of a round has passed a rank, the first one has come around the ring of ranks. If there
    is a remainder, some rounds are larger, and these come first: after a round smaller than the ring, a rank would wait
    for the first micro-batch.
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


def _later_first(row: tuple[Action, ...], made: Schedule) -> tuple[Action, ...]:
    """Run the backwards of a micro-batch's slices last to first: earlier slices get gradients from later ones."""
    order = made.backward_order(made.microbatches)
    return tuple(each if each.kind == "F" else replace(each, microbatch=order[each.microbatch]) for each in row)


def _alternated(forwards: list[Action], backwards: list[Action], *, ahead: int) -> tuple[Action, ...]:
    """Return `ahead` forwards, then forwards and backwards in alternation, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    left = backwards[len(forwards) - ahead :]
    return (*forwards[:ahead], *(action for pair in pairs for action in pair), *left)


def _bubble_of_model(ranks: int, _microbatches: int, _chunks: int) -> float:
    return (ranks - 1) / ranks


def _bubble_of_one_stage(ranks: int, microbatches: int, _chunks: int) -> float:
    return (ranks - 1) / (microbatches + ranks - 1)


def _bubble_of_interleaved(ranks: int, microbatches: int, chunks: int) -> float:
    """With fewer micro-batches than ranks, a rank waits for the first micro-batch after each chunk but the last."""
    idle = ranks - 1 + (chunks - 1) * max(0, ranks - microbatches)
    return idle / (chunks * microbatches + idle)


def _bubble_of_zb1p(ranks: int, microbatches: int, _chunks: int) -> float:
    """With fewer micro-batches than ranks, the trip to the last stage and back takes longer than a rank's work."""
    idle = ranks - 1 + max(0, ranks - microbatches)
    return idle / (3 * microbatches + idle)


def _bubble_of_zbv(ranks: int, microbatches: int, _chunks: int) -> float:
    """The longer of two decides: a rank's work after its first input, or the way of a micro-batch there and back."""
    makespan = max(6 * microbatches + ranks - 1, 4 * ranks + 2 * microbatches - 1)
    return 1 - 6 * microbatches / makespan


SCHEDULES = {
    "model": ScheduleRow(
        "one micro-batch at a time, through all stages and back", 1, round_robin, _model, _bubble_of_model
    ),
    "gpipe": ScheduleRow("all forwards, then all backwards", 1, round_robin, _gpipe, _bubble_of_one_stage),
    "1f1b": ScheduleRow(
        "one forward, one backward in turn; memory for as many micro-batches as stages",
        1,
        round_robin,
        _1f1b,
        _bubble_of_one_stage,
    ),
    "interleaved": ScheduleRow(
        "1f1b over several smaller stages per rank", None, round_robin, _interleaved, _bubble_of_interleaved
    ),
    "zb1p": ScheduleRow(
        "1f1b whose weight gradients fill the bubble", 1, round_robin, one_chunk, _bubble_of_zb1p, splits_backward=True
    ),
    "zbv": ScheduleRow(
        "two stages per rank in a V; weight gradients fill the bubble",
        2,
        vee,
        two_chunks,
        _bubble_of_zbv,
        splits_backward=True,
    ),
    "terapipe": ScheduleRow(
        "gpipe over slices of the sequences of each micro-batch, for causal models",
        1,
        round_robin,
        _gpipe,
        _bubble_of_one_stage,
        slices_tokens=True,
    ),
}
