"""The state of an `nn.Module`: parameters and buffers in place, under the names of the module without its wrappers."""

import sys
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.leaves import Leaf, Leaves, check, is_dtensor
from muster.jobs.session.stored import Stored, as_mapping
from muster.jobs.session.trees import Encoder, decode

WRAPPERS: Final = {  # module, class and attribute of what wraps a module without changing its parameters
    "torch.nn.parallel.distributed": ("DistributedDataParallel", "module"),
    "torch.nn.parallel.data_parallel": ("DataParallel", "module"),
    "torch._dynamo.eval_frame": ("OptimizedModule", "_orig_mod"),
    "muster.ddp.base": ("DataParallel", "module"),
}
COMPILED: Final = "_orig_mod."  # in names below a part that torch.compile has wrapped
FSDP1: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"


def is_a(value: object, module: str, name: str) -> bool:
    """True if a value has a class of a module; a module that nobody has imported is not imported here."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, torch.compile and the like."""
    for where, (kind, attribute) in WRAPPERS.items():
        if is_a(module, where, kind):
            return unwrapped(getattr(module, attribute))
    return module


class ModuleState:
    """A module whose tensors every rank has whole, or as DTensors."""

    kind = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = unwrapped(module)
        if any(is_a(each, FSDP1, "FullyShardedDataParallel") for each in self.module.modules()):
            raise RefusedError(
                f"state: {name}: FullyShardedDataParallel cannot be stored; use fully_shard (FSDP2), or muster.zero"
            )
        self.aliases: dict[str, str] = {}  # further names of tied tensors, below this module
        self.names: set[str] = set()  # of its tensors
        self.parameters: dict[int, Leaf] = {}  # by identity
        self.is_in_place = True  # False: state_dict() returns copies

    def path(self, key: str) -> str:
        """Return the stored name of an entry of the module's state_dict()."""
        return f"{self.name}/{key.replace(COMPILED, '')}"

    def capture(self, encoder: Encoder, leaves: Leaves) -> Any:
        """Add this rank's tensors to `leaves`; return the rest as JSON."""
        extra: dict[str, Any] = {}
        first: dict[object, Leaf] = {}
        self.aliases, self.parameters = {}, {}
        own = {id(each) for each in (*self.module.parameters(), *self.module.buffers())}
        self.is_in_place = True
        for key, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                extra[key] = encoder.encode(value, self.path(key))
                continue
            self.is_in_place &= id(value) in own
            check(self.path(key), value)
            leaf = self.leaf(self.path(key), value)
            # A rank's part of a DTensor can be empty, and then shares its address with others.
            memory = id(value) if is_dtensor(value) or not value.numel() else leaf.memory[2:]
            if (known := first.setdefault(memory, leaf)) is not leaf:
                self.aliases[leaf.name] = known.name
            else:
                leaves.add(leaf)
            self.parameters[id(value)] = known
        self.names = {leaf.name for leaf in first.values()}
        return {"extra": extra}

    def leaf(self, path: str, value: Tensor) -> Leaf:
        """Return the leaf of a tensor; of buffers, rank 0's counts."""
        is_parameter = isinstance(value, nn.Parameter)
        return Leaf(path, value, dealt=is_parameter, compared=is_parameter)

    def restore(self, stored: Stored, tree: Any) -> None:
        """Fill the tensors in place; hand the rest to the module."""
        leaves = Leaves()
        extra = self.capture(Encoder(leaves.leaf), leaves)["extra"]
        found = as_mapping(as_mapping(tree, self.name, "module").get("extra"), self.name, "extra state")
        if found.keys() != extra.keys():
            key = sorted(found.keys() ^ extra.keys())[0]
            raise RefusedError(f"state: {self.path(key)} is only on one side: in the checkpoint, or in this program")
        stored.require_known(self.name, self.known_names())
        for leaf in leaves:
            stored.fill(leaf)
        self.load_extra(found, leaves)

    def load_extra(self, found: Mapping[str, Any], leaves: Leaves) -> None:
        """Hand what could not be filled in place to the module's load_state_dict()."""
        if not found and self.is_in_place:
            return
        held = {leaf.name: leaf.tensor.detach() for leaf in leaves}
        held |= {name: held[of] for name, of in self.aliases.items()}
        # Loading a tensor into itself changes nothing; what state_dict() has copied is loaded here.
        values = {key: held.get(self.path(key), each) for key, each in self.module.state_dict().items()}
        decoded = {key: decode(each, held.__getitem__, self.path(key)) for key, each in found.items()}
        self.module.load_state_dict({**values, **decoded})

    def known_names(self) -> set[str]:
        """Return the names of tensors that ranks have together."""
        return self.names | self.aliases.keys()

    def finish(self) -> None:
        """Do what must follow the restoring of all objects."""
