"""Weights that several stages have: a head on the last stage that is the embedding of the first.

Each rank has a copy, which begins with the first one's bits. A step leaves each with the gradient of its own uses; then
they send each other theirs, and everybody adds them in the order of ranks: the same bits, so that the same optimizer
keeps copies equal.

    a loop        ((h0 + e0) + (h1 + e1)) + ...          h: of the head, e: of the embedding; by micro-batch
    ranks         (h0 + h1 + ...) + (e0 + e1 + ...)      the same numbers, rounded otherwise
    `exact`       a loop's: every use's gradient of every micro-batch is kept for itself, and sent for itself

So `exact` takes the memory of as many gradients as a rank makes of such a weight in a step, and as many messages. Its
bits are a loop's where a stage uses the weight once, and where no gradient is sparse: of one that is, rows that come
several times are added up before anything else is.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from muster.ddp.means import sum_in_order
from muster.pipe.wires.channels import TIED_TAG
from muster.pipe.wires.meeting import Meeting
from muster.pipe.wires.wire import Message, Wire

Use = tuple[int, int]  # stage and micro-batch


@dataclass(frozen=True)
class Tied:
    """One weight of several stages."""

    parameter: nn.Parameter
    name: str  # its first one, in the whole model
    own_name: str  # its name among the layers of this rank
    homes: tuple[tuple[nn.Module, str], ...]  # modules of this rank that have it, and what each calls it
    stages: tuple[int, ...]
    rank_of: tuple[int, ...]  # of every stage of the model

    def check(self) -> None:
        """See that the layers still have it.

        Raises:
            ValueError: they have another one.
        """
        if any(home._parameters.get(name) is not self.parameter for home, name in self.homes):
            raise ValueError(
                f"weight {self.own_name!r} of several stages was replaced by another one after the pipeline was built, "
                "as load_state_dict(assign=True) does: copy into it, or build a new Pipeline"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have it."""
        return tuple(sorted({self.rank_of[stage] for stage in self.stages}))


def find_ties(layers: nn.Sequential, lengths: Sequence[int], rank_of: tuple[int, ...], rank: int) -> list[Tied]:
    """List the parameters of this rank that several stages have, in an order that all agree on.

    `lengths` are how many layers each stage has.
    """
    stage_of = [stage for stage, length in enumerate(lengths) for _ in range(length)]
    uses: dict[int, list[tuple[int, str, nn.Parameter]]] = {}  # stage, name in the model, weight
    for (name, layer), stage in zip(layers._modules.items(), stage_of, strict=True):
        assert layer is not None
        for own, parameter in layer.named_parameters(name, remove_duplicate=False):
            uses.setdefault(id(parameter), []).append((stage, own, parameter))
    ties = []
    for each in uses.values():
        stages = tuple(sorted({stage for stage, _, _ in each}))
        mine = [name for stage, name, _ in each if rank_of[stage] == rank]
        if mine and len(stages) > 1:
            ties.append(Tied(each[0][2], each[0][1], mine[0], _homes(layers, mine), stages, rank_of))
    return ties


def _homes(layers: nn.Module, names: Sequence[str]) -> tuple[tuple[nn.Module, str], ...]:
    """Return the modules that have parameters of these names, and the last parts of the names."""
    parts = [name.rpartition(".") for name in names]
    return tuple((layers.get_submodule(path), name) for path, _, name in parts)


class Ties:
    """The weights that several stages have, some of them this rank's, and the wire to who else has them.

    `use` tells what a backward that runs now is of; with it sums have the bits of a loop.
    """

    def __init__(
        self, ties: Sequence[Tied], meeting: Meeting | None, rank: int, use: Callable[[], Use] | None = None
    ) -> None:
        self._meeting, self._rank, self._use = meeting, rank, use
        self._ties = [each for each in ties if use is not None or len(each.ranks) > 1]
        self._kept: list[dict[Use, Tensor]] = [{} for _ in self._ties]
        self._before: list[Tensor | None] = [None] * len(self._ties)
        self._microbatches = 0
        self._keeps = False  # gradients are kept by their uses
        self._watched: set[int] = set()  # ties whose gradients are seen as they come

    def names(self) -> Mapping[str, str]:
        """Map this rank's names of what another rank has before it to the names there."""
        return {each.own_name: each.name for each in self._ties if self._rank != each.ranks[0]}

    def share_weights(self) -> None:
        """Give every copy the first one's values: a collective."""
        for tied in self._ties:
            parts = self._exchange(tied, tied.parameter.detach())
            with torch.no_grad():
                tied.parameter.copy_(parts[0])

    @torch.no_grad()
    def begin(self, microbatches: int) -> None:
        """Begin a step. What gradients are already is set apart: it is the sum of earlier steps, on every rank."""
        self._microbatches, self._keeps = microbatches, self._use is not None
        for number, tied in enumerate(self._ties):
            tied.check()
            self._kept[number].clear()
            own = tied.parameter.grad
            self._before[number] = None if own is None else _whole(own).clone()
            if not tied.parameter.requires_grad:
                continue
            if self._keeps:
                self._watch(number)
            elif own is not None:
                own.zero_()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Make every copy's gradient the sum over all uses, and what it was when the step began: a collective.

        Raises:
            ValueError: a weight is another one than it was, or learns in some stages only.
        """
        keeps, self._keeps = self._keeps, False
        for number, tied in enumerate(self._ties):
            tied.check()
            self._agree_on_learning(tied)
            if not tied.parameter.requires_grad:
                continue
            before, self._before[number] = self._before[number], None
            if keeps:
                total = self._sum_by_uses(tied, number, before)
            else:
                own = tied.parameter.grad
                total = sum_in_order(self._exchange(tied, torch.zeros_like(tied.parameter) if own is None else own))
                total = total if before is None else before + total
            if (own := tied.parameter.grad) is None or own.is_sparse:
                tied.parameter.grad = total
            else:
                own.copy_(total)  # who looks at it sees it change

    def _sum_by_uses(self, tied: Tied, number: int, total: Tensor | None) -> Tensor:
        """Add to what was there, as a loop does: micro-batch by micro-batch, in each the last stage's use first."""
        nothing = torch.zeros_like(tied.parameter)
        for index in range(self._microbatches):
            mine = [self._kept[number].pop((stage, index), nothing) for stage in self._stages(tied, self._rank)]
            shapes = [(len(self._stages(tied, rank)), *nothing.shape) for rank in tied.ranks]
            stacks = self._exchange(tied, torch.stack(mine), shapes)
            of_stage = {
                stage: part
                for rank, stack in zip(tied.ranks, stacks, strict=True)
                for stage, part in zip(self._stages(tied, rank), stack, strict=True)
            }
            part = sum_in_order([of_stage[stage] for stage in reversed(tied.stages)])
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _watch(self, number: int) -> None:
        """Have gradients kept by their uses, from the first step on in which the weight learns."""
        if number not in self._watched:
            assert self._use is not None
            self._watched.add(number)
            keep = self._keeper(self._kept[number], self._use)
            self._ties[number].parameter.register_hook(keep)  # type: ignore[no-untyped-call]

    def _keeper(self, kept: dict[Use, Tensor], use: Callable[[], Use]) -> Callable[[Tensor], Tensor | None]:
        ties = weakref.ref(self)  # weights may outlive the pipeline

        def keep(gradient: Tensor) -> Tensor | None:
            """Keep a use's gradient, and let nothing be added in its place."""
            living = ties()
            if living is None or not living._keeps:
                return None
            place, whole = use(), _whole(gradient)
            kept[place] = kept[place] + whole if place in kept else whole.clone()
            return torch.zeros_like(gradient)

        return keep

    def _stages(self, tied: Tied, rank: int) -> list[int]:
        return [stage for stage in tied.stages if tied.rank_of[stage] == rank]

    def _agree_on_learning(self, tied: Tied) -> None:
        """See that a weight learns on all ranks, or on none: who has frozen it would let the others wait."""
        if self._meeting is None or len(tied.ranks) == 1:
            return
        mine = torch.tensor([int(tied.parameter.requires_grad)])
        learning = [bool(each) for each in self._exchange(tied, mine, wire=self._meeting.control)]
        if all(learning) == any(learning):
            return
        stages = [
            [stage for stage in tied.stages if learning[tied.ranks.index(tied.rank_of[stage])] == learns]
            for learns in (True, False)
        ]
        raise ValueError(
            f"weight {tied.own_name!r} learns in stages {stages[0]} and is frozen in stages {stages[1]}, which share "
            "it: freeze it on all of their ranks, or on none"
        )

    def _exchange(
        self,
        tied: Tied,
        mine: Tensor,
        shapes: Sequence[tuple[int, ...]] | None = None,
        wire: Wire | None = None,
    ) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks; by default over the wire of gradients."""
        mine = _whole(mine.detach()).contiguous()
        shapes = shapes or [tuple(mine.shape)] * len(tied.ranks)
        parts = [
            mine if rank == self._rank else mine.new_empty(shape)
            for rank, shape in zip(tied.ranks, shapes, strict=True)
        ]
        under_way: list[Message] = []
        for rank, part in zip(tied.ranks, parts, strict=True):
            if rank != self._rank:
                assert self._meeting is not None
                way = wire or self._meeting.wire
                under_way += [way.receive(part, rank, TIED_TAG), way.send(mine, rank, TIED_TAG)]
        for each in under_way:
            each.wait()
        return parts


def _whole(gradient: Tensor) -> Tensor:
    """Return a gradient that may be sparse as one of all numbers: a sum with another use's would be, too."""
    return gradient.to_dense() if gradient.is_sparse else gradient
