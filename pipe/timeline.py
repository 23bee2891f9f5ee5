"""Gather the actions and messages of all ranks of a pipeline in a step, as records on one clock.

    offsets = clock_offsets(group)                  repeat this every few minutes, because clocks drift
    pipeline.step(inputs, targets)
    records = gather(pipeline.spans, group, offsets)                on rank 0: `pipe.schedules.measured.Record`s

Pings measure the offset of a clock, as in the Network Time Protocol. Rank 0 notes when a ping leaves and when its
answer arrives; the other rank notes its own time in between. Of several pings, the one with the shortest round trip is
used, because it was delayed least. The error is at most half of that round trip.

    rank 0      sent ─────────╮            ╭──────── back        offset = there - (sent + back) / 2
    rank r                    ╰── there ───╯
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import device_of, gather_json
from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.draw import COMPUTE
from muster.pipe.schedules.measured import Record
from muster.pipe.schedules.programs import Send, Step, StepSpan

PINGS = 12
Clock = Callable[[], float]


@dataclass(frozen=True)
class Offset:
    """The offset of a rank's clock from rank 0's (positive: ahead), and the largest possible error of the offset."""

    offset_s: float
    uncertainty_s: float


def clock_offsets(
    process_group: dist.ProcessGroup | None = None, *, pings: int = PINGS, clock: Clock = time.monotonic
) -> list[Offset]:
    """Measure the offset of every rank's clock. This collective takes about 0.2 ms per ping and rank with gloo.

    Return the offsets in the order of the group's ranks. The offsets are valid only on rank 0.
    """
    rank, ranks = _place(process_group)
    offsets = [Offset(0.0, 0.0)] * ranks
    if ranks == 1:
        return offsets
    stamp = torch.zeros((), dtype=torch.float64, device=device_of(process_group))
    for peer in range(1, ranks):
        if rank == 0:
            rounds = [_ping(stamp, peer, process_group, clock) for _ in range(pings)]
            offsets[peer] = min(rounds, key=lambda each: each.uncertainty_s)
        elif rank == peer:
            for _ in range(pings):
                _answer(stamp, process_group, clock)
    return offsets


def offsets_by_meetings(
    process_group: dist.ProcessGroup | None = None, *, meetings: int = PINGS, clock: Clock = time.monotonic
) -> list[Offset]:
    """Measure the offset of every rank's clock without pairwise messages. This collective runs `meetings` all-reduces.

    Use this for NCCL, where each pair would need a communicator. If ranks share cores, pings are five times as
    precise. No rank leaves an all-reduce before all have entered it. So rank r's clock is ahead by at least (r enters -
    rank 0 leaves) and at most (r leaves - rank 0 enters). Every rank gets the offsets.
    """
    _, ranks = _place(process_group)
    if ranks == 1:
        return [Offset(0.0, 0.0)]
    token = torch.zeros((), device=device_of(process_group))
    mine = []
    for _ in range(meetings):
        mine.append(clock())
        dist.all_reduce(token, group=process_group)
        token.item()
        mine.append(clock())
    sent = torch.tensor(mine, dtype=torch.float64, device=token.device)
    every = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(every, sent, group=process_group)
    times = torch.stack(every).view(ranks, meetings, 2)  # (rank, all-reduce, entered and left)
    entered, left = times.unbind(-1)
    least = (entered - left[0]).amax(1)
    most = (left - entered[0]).amin(1)
    bounds = list(zip(least.tolist(), most.tolist(), strict=True))[1:]
    return [Offset(0.0, 0.0), *(Offset((low + high) / 2, (high - low) / 2) for low, high in bounds)]


def gather(
    spans: Iterable[StepSpan],
    process_group: dist.ProcessGroup | None = None,
    offsets: Sequence[Offset] | None = None,
) -> list[Record] | None:
    """Gather the spans of all ranks on rank 0. A collective. Other ranks get None.

    `spans` are `Pipeline.spans` of this rank's last step. Times are seconds since the first action of any rank began,
    and the records are sorted by start. Without `offsets` (from `clock_offsets`) the clocks are compared now.

    Raises:
        ValueError: If the number of offsets is not the number of ranks.
    """
    rank, ranks = _place(process_group)
    if offsets is None:
        offsets = clock_offsets(process_group)
    if len(offsets) != ranks:
        raise ValueError(f"offsets: found {len(offsets)}; expected one for each of {ranks} ranks")
    mine = records_of(spans, rank)
    if ranks == 1:
        return on_one_clock([mine], offsets)
    every = gather_json([list(vars(each).values()) for each in mine], process_group, device_of(process_group))
    return None if rank else on_one_clock([[Record(*each) for each in row] for row in every.values()], offsets)


def records_of(spans: Iterable[StepSpan], rank: int) -> list[Record]:
    """Return a rank's spans as records, in its own clock."""

    def kind(step: Step) -> str:
        return step.kind if isinstance(step, Action) else "send" if isinstance(step, Send) else "wait"

    return [
        Record(rank, kind(each.step), each.step.stage, each.step.microbatch, each.start_s, each.end_s) for each in spans
    ]


def on_one_clock(rows: Sequence[Sequence[Record]], offsets: Sequence[Offset]) -> list[Record]:
    """Convert records to seconds since the first action began, in the clock of rank 0; sort them by start."""
    moved = [
        replace(each, start_s=each.start_s - offset.offset_s, end_s=each.end_s - offset.offset_s)
        for row, offset in zip(rows, offsets, strict=True)
        for each in row
    ]
    began_s = min((each.start_s for each in moved if each.kind in COMPUTE), default=0.0)
    return sorted(
        (replace(each, start_s=each.start_s - began_s, end_s=each.end_s - began_s) for each in moved),
        key=lambda each: (each.start_s, each.rank),
    )


def _ping(stamp: Tensor, peer: int, group: dist.ProcessGroup | None, clock: Clock) -> Offset:
    sent_s = clock()
    dist.send(stamp, group=group, group_dst=peer)
    dist.recv(stamp, group=group, group_src=peer)
    there_s = stamp.item()  # on a GPU this waits for the message
    back_s = clock()
    return Offset(there_s - (sent_s + back_s) / 2, (back_s - sent_s) / 2)


def _answer(stamp: Tensor, group: dist.ProcessGroup | None, clock: Clock) -> None:
    dist.recv(stamp, group=group, group_src=0)
    stamp.item()
    stamp.fill_(clock())
    dist.send(stamp, group=group, group_dst=0)


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    if group is None and not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
