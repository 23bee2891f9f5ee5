"""The state of a `muster.pipe.Pipeline`: each rank holds the layers of its stages, whole, named as in the full model.

    rank 0  embed block1        rank 1  block2 norm head       the names are those of a model in one process
    rank 2  embed block1        rank 3  block2 norm head       a second pipeline: ranks 0 and 2 share the writing

A weight that several stages share is saved once, by the first stage.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import whole
from muster.jobs.session.state.leaves import Leaf, Leaves
from muster.jobs.session.state.modules import ModuleState
from muster.jobs.session.state.trees import Encoder
from muster.jobs.tensors.parts import DTYPES

if TYPE_CHECKING:
    from muster.pipe import Pipeline


class StagesState(ModuleState):
    """The layers of one rank of a pipeline. `meet` processes the descriptions of all ranks, before the first save."""

    def __init__(self, name: str, pipeline: "Pipeline") -> None:
        super().__init__(name, pipeline.module)
        self.tied = {self.path(own): self.path(first) for own, first in pipeline.tied.items()}
        self._known: set[str] = set()  # names of the whole model's tensors
        self._all_aliases: dict[str, str] = {}
        self._writes: set[str] | None = None  # names that this rank writes; None before `meet`

    def capture(self, encoder: Encoder, leaves: Leaves) -> Any:
        """Add this rank's layers."""
        tree = super().capture(encoder, leaves)
        if tree["extra"]:
            raise RefusedError(
                f"state: {self.path(sorted(tree['extra'])[0])}: an extra state of a pipeline's layer cannot be stored; "
                "keep it in a buffer"
            )
        self.aliases |= {**self.tied, **self._all_aliases}
        return tree

    def leaf(self, path: str, value: Tensor) -> Leaf:
        """Describe a tensor. A weight shared by stages has the name that it has in the first of them."""
        name = self.tied.get(path, path)
        piece = whole(name, DTYPES[value.dtype], tuple(value.shape))
        return Leaf(name, value, piece=piece, answers=name == path and (self._writes is None or name in self._writes))

    def describe(self) -> Any:
        """Describe this rank's tensors for the other ranks: names, whether each is a parameter, and aliases."""
        leaves = Leaves()
        self.capture(Encoder(leaves.leaf), leaves)
        own = [
            [leaf.name, isinstance(leaf.tensor, nn.Parameter)] for leaf in leaves if leaf.name not in self.tied.values()
        ]
        return {"own": own, "aliases": self.aliases}

    def meet(self, rank: int, described: Sequence[Any]) -> None:
        """Choose the rank that writes each tensor: for buffers the first holder, for parameters each in turn."""
        holders: dict[str, list[int]] = {}
        is_parameter: dict[str, bool] = {}
        for holder, each in enumerate(described):
            for name, learns in each["own"]:
                holders.setdefault(name, []).append(holder)
                is_parameter[name] = learns
            self._all_aliases |= each["aliases"]
        self._known = {*holders, *self._all_aliases}
        self._writes = {
            name
            for place, (name, ranks) in enumerate(sorted(holders.items()))
            if ranks[place % len(ranks) if is_parameter[name] else 0] == rank
        }

    def known_names(self) -> set[str]:
        """Return the names of the whole model's tensors."""
        return super().known_names() | self._known
