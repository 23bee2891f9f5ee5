"""The state of a user's loop: named objects and plain values that are saved and restored together.

    state = State({"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": 0.0})
    state.best = 0.5                    a plain value is an attribute that can be read and set

    names in a checkpoint    model/fc.weight   optimizer/fc.weight/exp_avg   rng/0/torch   and JSON for everything else

Tensors are described in `leaves.py`, plain values in `trees.py`. torch is used only if the program has imported it.
"""

import base64
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.session.state.objects import Registered, ValueState, plain
from muster.jobs.session.state.trees import Encoder

if TYPE_CHECKING:
    import torch

    from muster.jobs.checkpoint.manifest import CheckpointManifest
    from muster.jobs.checkpoint.read import CheckpointReader
    from muster.jobs.session.state.leaves import Leaves
    from muster.jobs.session.state.rng import Generators
    from muster.jobs.tensors.parts import TensorPart
    from muster.jobs.world.world import World

VERSION: Final = 1
MODEL: Final = "model"  # the object whose tensors `muster checkpoint export` writes
TAKEN: Final = {"rng", "parts", "meta", "join", "load", "notes", "has_tensors", "epoch_order", "begin_epoch"}


class State:
    """The named objects and values of a user's loop, saved and restored together.

    `notes` lists lines that rank 0 should print after a restore.

    Raises:
        RefusedError: if an object cannot be stored.
    """

    notes: list[str]
    _registered: dict[str, Registered]
    _given: Mapping[str, object]
    _trees: dict[str, Any] | None = None
    _aliases: Mapping[str, str] = {}
    _rank: int | None = None  # None before `join`; a reference to the world itself would keep its process group alive
    _ranks: int = 1
    _parts: "list[TensorPart]"
    _memory: list[tuple[object, ...]] | None = None
    _generators: "Generators | None" = None
    _order: str | None = None

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.__dict__.update(notes=[], _parts=[], _registered={}, _given=objects, has_tensors="torch" in sys.modules)
        for name in objects:
            if name in TAKEN or name.startswith("_") or "/" in name or not name.isprintable() or not name:
                raise RefusedError(f"state: {name!r:.80} cannot be the name of an object; choose another name")
        if self.has_tensors:
            from muster.jobs.session.state.kinds import register

            self._registered.update(register(objects))
        else:
            self._registered.update((name, plain(name, each)) for name, each in objects.items())
        self._capture()

    if TYPE_CHECKING:
        has_tensors: bool  # True if the program has imported torch; then torch's generators are stored

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._registered:
            raise AttributeError(f"the state has no {name!r}; it has {', '.join(self._registered) or 'nothing'}")
        registered = self._registered[name]
        return registered.owner if isinstance(registered, ValueState) else self._given[name]

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_") or name == "notes":
            self.__dict__[name] = value
            return
        registered = self._registered.get(name)
        if not isinstance(registered, ValueState):
            known = ", ".join(name for name, each in self._registered.items() if isinstance(each, ValueState))
            what = "is an object, which is restored in place" if registered else "was not given to run.state()"
            raise AttributeError(f"state.{name} cannot be set: it {what}; the plain values are: {known or 'none'}")
        registered.owner = value

    def join(self, world: "World", device: "torch.device | None" = None) -> None:
        """Check that every rank can store its state and that the states agree: a collective. Call it before `load`.

        Raises:
            RefusedError: on every rank, naming the object that cannot be stored, or the difference and its ranks.
        """
        self._rank, self._ranks = world.rank, world.size
        problem, leaves = None, None
        try:
            leaves = self._capture()
            for leaf in leaves or ():
                leaf.part()
        except MusterError as error:
            problem = str(error)
        if world.group is not None:
            from muster.jobs.session.state.agree import agree, refuse_together

            refuse_together(world, problem)
            assert leaves is not None
            agree(world, self._registered.values(), self._trees or {}, leaves)
        elif problem is not None:
            raise RefusedError(problem)
        if self.has_tensors and self._generators is None:
            from muster.jobs.session.state.rng import Generators

            self._generators = Generators(world.rank, device)

    def parts(self) -> "list[TensorPart]":
        """Return the parts that this rank writes. The same list is returned until the memory of a tensor changes."""
        leaves = self._capture()
        if leaves is None:
            return []
        assert self._rank is not None, "call join() first"
        assert self._generators is not None
        memory = [leaf.memory for leaf in leaves]
        if memory != self._memory:
            from muster.jobs.session.state.leaves import parts_of

            parts, stays = parts_of(leaves, rank=self._rank, ranks=self._ranks)
            self._parts = [*parts, *self._generators.parts]
            self._memory = memory if stays else None
        self._generators.take()
        return self._parts

    @property
    def epoch_order(self) -> str | None:
        """The order of the samples of this epoch (`jobs/session/order.py`). None if it is not known."""
        return self._order if self._generators is None else self._generators.order

    def begin_epoch(self, order: str) -> None:
        """Save this order with the state from now on."""
        self._order = order
        if self._generators is not None:
            self._generators.order, self._memory = order, None

    def meta(self) -> dict[str, Any]:
        """Return everything that is not a tensor as JSON, captured by the last call of `parts`.

        The keys belong at the top level of a checkpoint's meta: `load` reads `state`, `muster checkpoint export` reads
        `aliases`.
        """
        if not self.has_tensors:
            self._capture()
        kinds = {name: each.kind for name, each in self._registered.items()}
        objects = {name: {"kind": kinds[name], "tree": tree} for name, tree in (self._trees or {}).items()}
        state: dict[str, Any] = {"version": VERSION, "objects": objects, "aliases": dict(self._aliases)}
        if not self.has_tensors and self._ranks == 1:
            from muster.jobs.session.state.generator import python_state

            state["rng"] = base64.b64encode(python_state()).decode()
            state["order"] = self._order
        prefix = f"{MODEL}/"
        return {
            "state": state,
            "aliases": {
                name.removeprefix(prefix): of.removeprefix(prefix)
                for name, of in self._aliases.items()
                if name.startswith(prefix) and of.startswith(prefix)
            },
        }

    def load(self, manifest: "CheckpointManifest", reader: "CheckpointReader", meta: Mapping[str, Any]) -> None:
        """Restore everything on this rank. Every rank calls it, after `join`.

        Raises:
            RefusedError: if another program or model wrote the checkpoint; the message names the first difference.
            BadCheckpointError, StorageError: if the checkpoint cannot be read.
        """
        assert self._rank is not None, "call join() first"
        state = meta.get("state")
        if not isinstance(state, dict) or state.get("version") != VERSION:
            raise RefusedError("state: the checkpoint was not saved by a session; restore with the job that saved it")
        objects, stored = state["objects"], None
        self._require_same_objects(objects)
        if self.has_tensors:
            from muster.jobs.session.state.stored import Stored

            stored = Stored(manifest, reader, state["aliases"])
        for each in self._in_order():
            each.restore(stored, objects[each.name]["tree"])  # type: ignore[arg-type]
        for each in self._registered.values():
            each.finish()
        self._memory, self.notes = None, []
        if self._generators is not None and stored is not None:
            self.notes = [*self._generators.restore(stored, self._ranks)]
        elif "rng" in state:
            from muster.jobs.session.state.generator import set_python_state

            set_python_state(base64.b64decode(state["rng"]))
            self._order = state.get("order")

    def _require_same_objects(self, objects: Mapping[str, Any]) -> None:
        for name in sorted(objects.keys() ^ self._registered.keys()):
            side = (
                "in the checkpoint, but not registered" if name in objects else "registered, but not in the checkpoint"
            )
            raise RefusedError(f"state: {name} is {side}; register the same objects as when it was saved")
        for name, each in self._registered.items():
            if (kind := objects[name]["kind"]) != each.kind:
                raise RefusedError(
                    f"state: {name} is of kind {each.kind} in this program and of kind {kind} in the checkpoint; "
                    "register the same objects as when it was saved"
                )

    def _capture(self) -> "Leaves | None":
        """Capture every object: store the trees, and return the leaves (None if the program does not use torch)."""
        leaves = None
        if self.has_tensors:
            from muster.jobs.session.state.leaves import Leaves

            leaves = Leaves()
        encoder = Encoder(leaves.leaf if leaves is not None else _no_leaf)
        self._trees = {each.name: each.capture(encoder, leaves) for each in self._in_order()}  # type: ignore[arg-type]
        self._aliases = {
            name: of for each in self._registered.values() for name, of in getattr(each, "aliases", {}).items()
        }
        return leaves

    def _in_order(self) -> Iterator[Registered]:
        """Yield the objects, modules first, because optimizers use the modules' names of parameters."""
        yield from sorted(self._registered.values(), key=lambda each: each.kind != "module")


def _no_leaf(path: str, value: object) -> None:
    return None
