"""The state of an `nn.Module`: parameters and buffers, restored in place, under the names of the unwrapped module."""

import sys
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.state.leaves import Leaf, Leaves, check, is_dtensor
from muster.jobs.session.state.objects import Registered
from muster.jobs.session.state.stored import Stored, as_mapping
from muster.jobs.session.state.trees import Encoder, decode

WRAPPERS: Final = {  # classes that wrap a module: {Python module: (class, attribute with the wrapped module)}
    "torch.nn.parallel.distributed": ("DistributedDataParallel", "module"),
    "torch.nn.parallel.data_parallel": ("DataParallel", "module"),
    "torch._dynamo.eval_frame": ("OptimizedModule", "_orig_mod"),
    "muster.ddp.base": ("DataParallel", "module"),
}
COMPILED: Final = "_orig_mod."  # part of the names of submodules wrapped by torch.compile
FSDP1: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"


def is_a(value: object, module: str, name: str) -> bool:
    """Return whether a value is an instance of the class `name` of `module`, without importing that module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers such as DistributedDataParallel and torch.compile."""
    for where, (kind, attribute) in WRAPPERS.items():
        if is_a(module, where, kind):
            return unwrapped(getattr(module, attribute))
    return module


class ModuleState(Registered):
    """A module with whole tensors or DTensors on each rank."""

    kind = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name)
        self.module = unwrapped(module)
        if any(is_a(each, FSDP1, "FullyShardedDataParallel") for each in self.module.modules()):
            raise RefusedError(
                f"state: {name}: FullyShardedDataParallel cannot be stored; use fully_shard (FSDP2), or muster.zero"
            )
        self.aliases: dict[str, str] = {}  # {other name of a tied tensor: its stored name}
        self.names: set[str] = set()  # stored names of all its tensors
        self.parameters: dict[int, Leaf] = {}  # {id of a parameter or buffer: its leaf}
        self.is_in_place = True  # False: state_dict() returns copies, so load_state_dict() must be called

    def path(self, key: str) -> str:
        """Return the stored name of an entry of the module's state_dict()."""
        return f"{self.name}/{key.replace(COMPILED, '')}"

    def capture(self, encoder: Encoder, leaves: Leaves) -> Any:
        """Add this rank's tensors to `leaves`; return the rest as JSON."""
        extra: dict[str, Any] = {}
        first: dict[object, Leaf] = {}
        self.aliases, self.parameters = {}, {}
        own = {id(each) for each in (*self.module.parameters(), *self.module.buffers())}
        self.is_in_place = type(self.module).state_dict is nn.Module.state_dict
        for key, value in self._entries().items():
            if not isinstance(value, Tensor):
                extra[key] = encoder.encode(value, self.path(key))
                continue
            self.is_in_place &= id(value) in own
            check(self.path(key), value)
            leaf = self.leaf(self.path(key), value)
            # Empty tensors share an address, and a rank's part of a DTensor may be empty.
            memory = id(value) if is_dtensor(value) or not value.numel() else leaf.memory[2:]
            if (known := first.setdefault(memory, leaf)) is not leaf:
                self.aliases[leaf.name] = known.name
            else:
                leaves.add(leaf)
            self.parameters[id(value)] = known
        self.names = {leaf.name for leaf in first.values()}
        return {"extra": extra}

    def _entries(self) -> Mapping[str, Any]:
        """Return the module's state_dict(), with the parameters and buffers themselves where possible."""
        if type(self.module).state_dict is nn.Module.state_dict:
            found: Mapping[str, Any] = self.module.state_dict(keep_vars=True)
            return found
        plain = [each for each in (*self.module.parameters(), *self.module.buffers()) if not is_dtensor(each)]
        own = {(each.data_ptr(), each.shape): each for each in plain if each.numel()}
        return {
            key: own.get((each.data_ptr(), each.shape), each) if isinstance(each, Tensor) else each
            for key, each in self.module.state_dict().items()
        }

    def leaf(self, path: str, value: Tensor) -> Leaf:
        """Describe a parameter or buffer. Buffers may differ between ranks; rank 0's are saved."""
        is_parameter = isinstance(value, nn.Parameter)
        return Leaf(path, value, dealt=is_parameter, compared=is_parameter)

    def restore(self, stored: Stored, tree: Any) -> None:
        """Fill the tensors in place, and pass all other values to the module."""
        leaves = Leaves()
        extra = self.capture(Encoder(leaves.leaf), leaves)["extra"]
        found = as_mapping(as_mapping(tree, self.name, "module").get("extra"), self.name, "extra state")
        if found.keys() != extra.keys():
            key = sorted(found.keys() ^ extra.keys())[0]
            raise RefusedError(
                f"state: {self.path(key)} is {'not ' * (key not in found)}in the checkpoint, but "
                f"{'not ' * (key not in extra)}in this program; restore with the program that saved it"
            )
        stored.require_known(self.name, self.known_names())
        for leaf in leaves:
            stored.fill(leaf)
        self.load_extra(found, leaves)

    def load_extra(self, found: Mapping[str, Any], leaves: Leaves) -> None:
        """Pass values that could not be filled in place to the module's load_state_dict()."""
        if not found and self.is_in_place:
            return
        held = {leaf.name: leaf.tensor.detach() for leaf in leaves}
        held |= {name: held[of] for name, of in self.aliases.items()}
        # If state_dict() returned copies, their values reach the module here. The module's own tensors are copied onto
        # themselves, which changes nothing.
        values = {key: held.get(self.path(key), each) for key, each in self.module.state_dict().items()}
        decoded = {key: decode(each, held.__getitem__, self.path(key)) for key, each in found.items()}
        self.module.load_state_dict({**values, **decoded})

    def known_names(self) -> set[str]:
        """Return the stored names of the module's tensors on all ranks, including the aliases of tied tensors."""
        return self.names | self.aliases.keys()
