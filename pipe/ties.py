"""Weights shared by several stages, for example by a head on the last stage and the embedding on the first stage.

Each rank has its own copy. Building the pipeline copies the first rank's values to all. In a step, each copy
accumulates the gradient of its own uses. Then the ranks exchange these gradients, and each adds them in the order of
ranks. So all copies get the same bits, and the same optimizer keeps them equal.

    a loop        ((h0 + e0) + (h1 + e1)) + ...          h: of the head, e: of the embedding; by micro-batch
    ranks         (h0 + h1 + ...) + (e0 + e1 + ...)      the same terms, rounded differently
    `exact`       the loop's order: the gradient of each use in each micro-batch is kept and sent separately

So `exact` needs memory and messages for every gradient of such a weight in a step. The bits equal those of a loop if
each stage uses the weight once and no gradient is sparse. In a sparse gradient, duplicate rows are added up first, so
bits may differ.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from muster.ddp.means import sum_in_order
from muster.pipe.wires.channels import TIED_TAG
from muster.pipe.wires.connections import Connections
from muster.pipe.wires.wire import Message, Wire

Use = tuple[int, int]  # stage and micro-batch


@dataclass(frozen=True)
class TiedWeight:
    """One weight shared by several stages."""

    parameter: nn.Parameter
    name: str  # the weight's name at its first use in the whole model
    own_name: str  # the weight's name in the layers of this rank
    homes: tuple[tuple[nn.Module, str], ...]  # modules of this rank that hold the weight, with its name in each
    stages: tuple[int, ...]
    rank_of: tuple[int, ...]  # the rank of every stage of the model

    def check(self) -> None:
        """Check that the layers still hold this parameter.

        Raises:
            ValueError: If a layer now holds a different parameter.
        """
        if any(home._parameters.get(name) is not self.parameter for home, name in self.homes):
            raise ValueError(
                f"weight {self.own_name!r} of several stages was replaced after the pipeline was built, as by "
                "load_state_dict(assign=True); copy new values into it, or build a new Pipeline"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold the weight."""
        return tuple(sorted({self.rank_of[stage] for stage in self.stages}))


def find_ties(layers: nn.Sequential, lengths: Sequence[int], rank_of: tuple[int, ...], rank: int) -> list[TiedWeight]:
    """List this rank's parameters that are shared by several stages, in the same order on every rank.

    `lengths` are the numbers of layers of the stages.
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
            ties.append(TiedWeight(each[0][2], each[0][1], mine[0], _homes(layers, mine), stages, rank_of))
    return ties


def _homes(layers: nn.Module, names: Sequence[str]) -> tuple[tuple[nn.Module, str], ...]:
    """Return the modules that hold parameters of these names, each with the last part of the parameter's name."""
    parts = [name.rpartition(".") for name in names]
    return tuple((layers.get_submodule(path), name) for path, _, name in parts)


class Ties:
    """This rank's weights shared by several stages, and the exchange of their gradients with the other ranks.

    `use` returns the stage and micro-batch of the running backward. If `use` is given, the sums have the same bits as
    in a loop over micro-batches.
    """

    def __init__(
        self,
        ties: Sequence[TiedWeight],
        connections: Connections | None,
        rank: int,
        use: Callable[[], Use] | None = None,
    ) -> None:
        self._connections, self._rank, self._use = connections, rank, use
        self._ties = [each for each in ties if use is not None or len(each.ranks) > 1]
        self._kept: list[dict[Use, Tensor]] = [{} for _ in self._ties]
        self._before: list[Tensor | None] = [None] * len(self._ties)
        self._microbatches = 0
        self._keeps = False  # True if the gradient of each use is kept
        self._watched: set[int] = set()  # indices of ties whose weight has a gradient hook

    def names(self) -> Mapping[str, str]:
        """Map this rank's names of weights that an earlier rank also holds to the names at their first use."""
        return {each.own_name: each.name for each in self._ties if self._rank != each.ranks[0]}

    def share_weights(self) -> None:
        """Copy the first rank's values to every copy. A collective."""
        for tied in self._ties:
            parts = self._exchange(tied, tied.parameter.detach())
            with torch.no_grad():
                tied.parameter.copy_(parts[0])

    @torch.no_grad()
    def begin(self, microbatches: int) -> None:
        """Begin a step. Set aside gradients of earlier steps, which are already summed over the ranks."""
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
        """Set every copy's gradient to the sum over all uses plus its value at the start of the step. A collective.

        Raises:
            ValueError: If a weight was replaced, or is trainable in only some stages.
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
                own.copy_(total)  # copied in place, because other tensors may share this memory

    def _sum_by_uses(self, tied: TiedWeight, number: int, total: Tensor | None) -> Tensor:
        """Add the gradients of all uses to `total` as a loop does: by micro-batch, then from the last stage back."""
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
        """Register the hook that keeps the gradient of each use, unless it is already registered."""
        if number not in self._watched:
            assert self._use is not None
            self._watched.add(number)
            keep = self._keeper(self._kept[number], self._use)
            self._ties[number].parameter.register_hook(keep)  # type: ignore[no-untyped-call]

    def _keeper(self, kept: dict[Use, Tensor], use: Callable[[], Use]) -> Callable[[Tensor], Tensor | None]:
        ties = weakref.ref(self)  # weak, because weights may outlive the pipeline

        def keep(gradient: Tensor) -> Tensor | None:
            """Store the gradient of a use, and make autograd accumulate zeros instead."""
            living = ties()
            if living is None or not living._keeps:
                return None
            place, whole = use(), _whole(gradient)
            kept[place] = kept[place] + whole if place in kept else whole.clone()
            return torch.zeros_like(gradient)

        return keep

    def _stages(self, tied: TiedWeight, rank: int) -> list[int]:
        return [stage for stage in tied.stages if tied.rank_of[stage] == rank]

    def _agree_on_learning(self, tied: TiedWeight) -> None:
        """Refuse a weight that is trainable on only some of its ranks: those ranks would wait forever."""
        if self._connections is None or len(tied.ranks) == 1:
            return
        mine = torch.tensor([int(tied.parameter.requires_grad)])
        learning = [bool(each) for each in self._exchange(tied, mine, wire=self._connections.control)]
        if all(learning) == any(learning):
            return
        stages = [
            [stage for stage in tied.stages if learning[tied.ranks.index(tied.rank_of[stage])] == learns]
            for learns in (True, False)
        ]
        raise ValueError(
            f"weight {tied.own_name!r} is trainable in stages {stages[0]} but frozen in stages {stages[1]}; "
            "freeze it on all ranks that share it, or on none"
        )

    def _exchange(
        self,
        tied: TiedWeight,
        mine: Tensor,
        shapes: Sequence[tuple[int, ...]] | None = None,
        wire: Wire | None = None,
    ) -> list[Tensor]:
        """Exchange a tensor with the other ranks that hold the weight; return all tensors in the order of ranks."""
        mine = _whole(mine.detach()).contiguous()
        shapes = shapes or [tuple(mine.shape)] * len(tied.ranks)
        parts = [
            mine if rank == self._rank else mine.new_empty(shape)
            for rank, shape in zip(tied.ranks, shapes, strict=True)
        ]
        under_way: list[Message] = []
        for rank, part in zip(tied.ranks, parts, strict=True):
            if rank != self._rank:
                assert self._connections is not None
                way = wire or self._connections.wire
                under_way += [way.receive(part, rank, TIED_TAG), way.send(mine, rank, TIED_TAG)]
        for each in under_way:
            each.wait()
        return parts


def _whole(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor, because its sum with another use's gradient is usually dense."""
    return gradient.to_dense() if gradient.is_sparse else gradient
