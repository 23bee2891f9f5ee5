"""Weights that several ranks have: a head on the last stage that is the embedding of the first.

Each rank has a copy, which begins with the first one's bits. A step leaves each with the gradient of its own use; then
they send each other theirs, and everybody adds them in the order of ranks: the same bits, so that the same optimizer
keeps copies equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipe.channels import TIED_TAG
from pipe.wires import Message, Wire


@dataclass(frozen=True)
class Tied:
    """One weight of several ranks."""

    parameter: nn.Parameter
    name: str  # its first one, in the whole model
    own_name: str  # its name among the layers of this rank
    ranks: tuple[int, ...]


def find_ties(layers: nn.Sequential, rank_of_layer: Sequence[int], rank: int) -> list[Tied]:
    """List the parameters that this rank shares with others, in an order that all agree on."""
    uses: dict[int, list[tuple[int, str, nn.Parameter]]] = {}
    for (name, layer), owner in zip(layers._modules.items(), rank_of_layer, strict=True):
        assert layer is not None
        for own, parameter in layer.named_parameters(name, remove_duplicate=False):
            uses.setdefault(id(parameter), []).append((owner, own, parameter))
    ties = []
    for each in uses.values():
        ranks = tuple(sorted({owner for owner, _, _ in each}))
        if rank in ranks and len(ranks) > 1:
            mine = next(name for owner, name, _ in each if owner == rank)
            ties.append(Tied(each[0][2], each[0][1], mine, ranks))
    return ties


class Ties:
    """The weights that this rank shares, and the wire to who has them too."""

    def __init__(self, ties: Sequence[Tied], wire: Wire, rank: int) -> None:
        self._ties, self._wire, self._rank = ties, wire, rank

    def names(self) -> Mapping[str, str]:
        """Map this rank's names of what another rank has before it to the names there."""
        return {each.own_name: each.name for each in self._ties if self._rank != each.ranks[0]}

    def share_weights(self) -> None:
        """Give every copy the first one's values: a collective."""
        for number, tied in enumerate(self._ties):
            parts = self._exchange(tied, number, tied.parameter.detach())
            with torch.no_grad():
                tied.parameter.copy_(parts[0])

    def sum_gradients(self) -> None:
        """Make every copy's gradient the sum over all uses: a collective."""
        for number, tied in enumerate(self._ties):
            if not tied.parameter.requires_grad:
                continue
            own = tied.parameter.grad
            parts = self._exchange(tied, number, torch.zeros_like(tied.parameter) if own is None else own)
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            if own is None:
                tied.parameter.grad = total
            else:
                own.copy_(total)

    def _exchange(self, tied: Tied, number: int, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks."""
        mine = mine.detach().contiguous()
        parts = [mine if rank == self._rank else torch.empty_like(mine) for rank in tied.ranks]
        under_way: list[Message] = []
        for rank, part in zip(tied.ranks, parts, strict=True):
            if rank != self._rank:
                under_way.append(self._wire.receive(part, rank, TIED_TAG))
                under_way.append(self._wire.send(mine, rank, TIED_TAG))
        for each in under_way:
            each.wait()
        return parts
