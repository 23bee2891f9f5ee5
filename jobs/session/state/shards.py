"""The state of `muster.zero`: each rank holds flat ranges of the parameters and of the optimizer's state.

    model/up.weight (4, 6)   rank 0  [0, 10)    rank 1  [10, 20)    rank 2  [20, 24)

Tensors have the names of the unwrapped module, so a checkpoint can be read with any other split.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.state.leaves import Leaf, Leaves
from muster.jobs.session.state.modules import ModuleState, is_a
from muster.jobs.session.state.optimizers import MASTER, OptimizerState
from muster.jobs.session.state.stored import Stored
from muster.jobs.session.state.trees import Encoder, decode
from muster.jobs.tensors.modules import ON_HOST, persistent_buffers
from muster.jobs.tensors.parts import DTYPES, range_piece

if TYPE_CHECKING:
    from muster.zero import ShardedOptimizer
    from muster.zero.flat import ParameterRange
    from muster.zero.segments import Segment
    from muster.zero.sharded import Sharded

EXTRA: Final = "_extra_state"


class ShardedModule(ModuleState):
    """A module in a wrapper of `muster.zero`. Its state_dict() would gather the whole model, so it is never called."""

    def __init__(self, name: str, wrapper: "Sharded") -> None:
        super().__init__(name, wrapper.module)
        if is_a(wrapper.module, "muster.pipe.run", "StageLayers"):
            raise RefusedError(f"state: {name}: sharded pipeline stages cannot be stored; wrap the stages in DDP")
        self.wrapper = wrapper
        self.has_masters = False  # True: the float32 copies were restored, so the parameters are rounded from them

    def capture(self, encoder: Encoder, leaves: Leaves) -> Any:
        """Add the buffers and this rank's ranges of the parameters; return extra states as JSON."""
        named = list(self.module.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        self.aliases, self.parameters = {}, {}
        for key, parameter in named:
            if (known := first.setdefault(id(parameter), key)) != key:
                self.aliases[self.path(key)] = self.path(known)
            else:
                self.parameters[id(parameter)] = Leaf(self.path(key), parameter)
        buffers = [Leaf(self.path(key), buffer) for key, buffer in persistent_buffers(self.module)]
        self.names = {leaf.name for leaf in (*buffers, *self.parameters.values())}
        for leaf in buffers:
            leaves.add(leaf)
        for held in self.wrapper.held_parameters():
            leaves.add(leaf_of(self.path(held.name), held))
        return {"extra": {key: encoder.encode(each, self.path(key)) for key, each, _ in self._extras()}}

    def _extras(self) -> Iterator[tuple[str, Any, nn.Module]]:
        for path, part in self.module.named_modules():
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                yield f"{path}.{EXTRA}".removeprefix("."), part.get_extra_state(), part

    def load_extra(self, found: Mapping[str, Any], leaves: Leaves) -> None:
        """Pass the extra states to their modules."""
        held = {leaf.name: leaf.tensor for leaf in leaves}
        for key, _, part in self._extras():
            part.set_extra_state(decode(found[key], held.__getitem__, self.path(key)))

    def restore(self, stored: Stored, tree: Any) -> None:
        """Fill the ranges of this rank."""
        self.has_masters = False
        super().restore(stored, tree)

    def finish(self) -> None:
        """Gather the parameters from their shards: a collective."""
        self.wrapper.refresh(masters=self.has_masters)


class ShardedOptimizerState(OptimizerState):
    """A `ShardedOptimizer`, with or without a sharded module. Its inner optimizer has only this rank's state."""

    def __init__(self, name: str, optimizer: "ShardedOptimizer", modules: Sequence[ModuleState]) -> None:
        super().__init__(name, optimizer, modules)
        self.sharded = optimizer

    def capture(self, encoder: Encoder, leaves: Leaves) -> Any:
        """Add this rank's ranges, after copying the settings that the inner optimizer has changed in its groups."""
        self.sharded.share_settings()
        return super().capture(encoder, leaves)

    def capture_state(self, encoder: Encoder, leaves: Leaves) -> dict[str, Any]:
        """Add the ranges of the parameters' states."""
        for path, held in self._held():
            leaves.add(leaf_of(path, held))
        for state in self.sharded.inner.state.values():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    raise RefusedError(f"state: {self.name}: {key} of a ShardedOptimizer must be a tensor to be stored")
        return {}

    def restore_state(self, stored: Stored, values: Mapping[str, Any]) -> None:
        """Create the inner optimizer's state as its first step would, then fill this rank's ranges."""
        if keys := sorted({key for kept in values.values() for key in kept}):
            raise RefusedError(
                f"state: {self.name}: {', '.join(keys)} in the checkpoint is not a tensor, so only an optimizer that "
                "is not sharded can restore it"
            )
        self.sharded.share_settings()
        self.sharded.source.mend()  # without a sharded module, this copies the restored parameters to float32 copies
        by_path, names = self._stored_keys(stored, values), self._paths()
        for group, segment in self._segments():
            now = self.sharded.inner.state.pop(segment.stepped, {})
            shape, made = tuple(segment.stepped.shape), dict[str, Tensor]()
            for at in segment.slices:
                pieces = by_path.get(names[segment.flat_parameter.names[at.tensor]], {})
                for key, piece in pieces.items():
                    # A step count is one number for a whole parameter; other states have the parameter's shape.
                    is_number = key in ON_HOST or piece.shape != tuple(segment.flat_parameter.shapes[at.tensor])
                    dtype = piece.dtype if MASTER in pieces else DTYPES[segment.stepped.dtype]
                    wanted = piece if is_number else replace(piece, shape=shape, dtype=dtype)
                    if key not in (MASTER, *made):
                        made[key] = self._room(self.name, now.get(key), segment.stepped, key, wanted, group)
            if made:
                self.sharded.inner.state[segment.stepped] = made
        for path, held in self._held():
            if stored.piece(path) is not None:
                stored.fill(leaf_of(path, held), casts=True)  # with float32 copies, all state is float32
                for owner in self.modules if held.key == MASTER else ():
                    if isinstance(owner, ShardedModule):
                        owner.has_masters = True

    def _held(self) -> Iterator[tuple[str, "ParameterRange"]]:
        names = self._paths()
        try:
            state = self.sharded.held_state()
        except ValueError as error:  # a state of the optimizer cannot be split
            raise RefusedError(f"state: {self.name}: {error}") from error
        for held in state:
            yield f"{names[held.name]}/{held.key}", held

    def _paths(self) -> dict[str, str]:
        """Map the optimizer's name of each parameter to the parameter's path."""
        by_id = {id(parameter): path for path, parameter, *_ in self.parameters()}
        return {
            name: by_id[id(parameter)]
            for _, segment in self._segments()
            for name, parameter in zip(segment.flat_parameter.names, segment.flat_parameter.parameters, strict=True)
            if id(parameter) in by_id
        }

    def _segments(self) -> Iterator[tuple[dict[str, Any], "Segment"]]:
        """Yield the tensors that the inner optimizer updates, each with its group."""
        for group, segments in zip(self.sharded.param_groups, self.sharded.segments, strict=True):
            for segment in segments:
                yield group, segment


def leaf_of(name: str, held: "ParameterRange") -> Leaf:
    """Return the leaf for a range that a rank holds."""
    piece = range_piece(name, held.tensor.dtype, held.shape, held.start, held.stop)
    return Leaf(name, held.tensor, piece=piece, answers=held.answers)
