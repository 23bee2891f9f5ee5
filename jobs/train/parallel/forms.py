"""The names, dtypes and shapes of a model's tensors as in checkpoints: model/<name>, optimizer/<parameter>/<key>."""

from typing import Final

from torch import nn

from muster.jobs.checkpoint.pieces import whole
from muster.jobs.tensors.modules import persistent_buffers
from muster.jobs.tensors.parts import DTYPES, TensorPart, whole_part

MODEL: Final = "model/"
OPTIMIZER: Final = "optimizer/"


class Forms:
    """The names, dtypes and shapes of a model's tensors, recorded while each rank still has the whole model."""

    def __init__(self, module: nn.Module) -> None:
        self.pieces = {
            name: whole(MODEL + name, DTYPES[each.dtype], tuple(each.shape)) for name, each in module.named_parameters()
        }
        self.trained = {name for name, each in module.named_parameters() if each.requires_grad}
        self.buffers = [part.piece for part in buffer_parts(module)]
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        named = module.named_parameters(remove_duplicate=False)
        # {other name of a shared parameter: the name under which it is saved}
        self.aliases = {name: first[id(each)] for name, each in named if first[id(each)] != name}


def parameter_of(name: str) -> str:
    """Return the name of the parameter or buffer in a stored name."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(MODEL)


def named_as(name: str, parameter: str) -> str:
    """Replace the parameter's name in a stored name."""
    return f"{OPTIMIZER}{parameter}/{name.rpartition('/')[2]}" if name.startswith(OPTIMIZER) else MODEL + parameter


def buffer_parts(module: nn.Module) -> list[TensorPart]:
    """List the persistent buffers in the model's order, shared ones once."""
    return [whole_part(MODEL + name, buffer) for name, buffer in persistent_buffers(module)]
