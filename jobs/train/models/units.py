"""Units: what of a model is gathered and given back together where ranks share its parameters out.

    gpt    block1 | block2 | ...            around them, for the whole step: embed, norm, head
    vgg    conv1 norm1 | conv2 norm2 | ... | head

`jobs/models/anatomy.py` has the same units by their shapes; a test compares the two.
"""

from torch import nn

from muster.jobs.train.models.gpt import Block

Unit = tuple[nn.Module, ...]


def units_of(model: nn.Module) -> list[Unit]:
    """List a model's units in the order of its forward, as modules that run one after the other."""
    if any(isinstance(layer, Block) for layer in model.children()):
        return [(layer,) for layer in model.children() if isinstance(layer, Block)]
    units: list[Unit] = []
    for name, layer in model.named_children():
        if next(layer.parameters(), None) is None:
            continue
        if units and name.startswith("norm"):
            units[-1] += (layer,)
        else:
            units.append((layer,))
    return units


def of_one_dtype(unit: Unit) -> list[Unit]:
    """Cut a unit where the type of parameters changes; each module has parameters of one type."""
    cut: list[Unit] = []
    for module in unit:
        if cut and _dtype(cut[-1][-1]) == _dtype(module):
            cut[-1] += (module,)
        else:
            cut.append((module,))
    return cut


def _dtype(module: nn.Module) -> object:
    return next(module.parameters()).dtype
