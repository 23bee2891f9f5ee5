"""The user's model and loss, named by `train.model.make` and `train.loss`.

    model                            data parallel, ZeRO     pipelines
    an nn.Sequential                 its layers in turn      its layers
    has stages()                     its own forward         the layers that stages() returns
    any other nn.Module              its own forward         refused

Muster adds a second argument to each model: `forward(inputs)` returns outputs, `forward(inputs, targets)` their mean
loss. Parameters keep their names in every mode: a layer of stages() has the name of its module in the model.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.modes import MODES, PIPELINES, TENSOR
from muster.jobs.train.models.stack import LayerStack, Loss, head_loss, mean_loss
from muster.jobs.train.rng.draws import drawing
from muster.jobs.train.rng.keyed import INITIALISE, key
from muster.jobs.user import code
from muster.pipe.weighing import counted_loss

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

KEY = "train.model"


def make_model(settings: "TrainSettings") -> nn.Module:
    """Call the user's function, and attach the loss to the module that it returns. Only the seed affects its values.

    Raises:
        RefusedError: if the function cannot be called, raises, or does not return a module with trainable parameters.
    """
    text, args = settings.model.make, settings.model.args
    assert text is not None
    with drawing(key(settings.seed, INITIALISE)):
        model = code.make(KEY, text, args, Path.cwd())
    if not isinstance(model, nn.Module):
        raise RefusedError(f"{KEY}.make: {text} returned a {type(model).__name__}; return an nn.Module")
    if not any(each.requires_grad for each in model.parameters()):
        raise RefusedError(
            f"{KEY}.make: {text} returned a {type(model).__name__} without parameters to train; add some"
        )
    loss = loss_of(settings)
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return stack_of([(name, each) for name, each in model._modules.items() if each is not None], loss)
    give_loss(model, loss)
    return model


def give_loss(model: nn.Module, loss: Loss) -> None:
    """Make a model return the mean loss if it is called with targets; in place."""
    if isinstance(model, LayerStack):
        model.run_loss = partial(head_loss, loss)
        return
    forward = model.forward.args[0] if isinstance(model.forward, partial) else model.forward
    model.forward = partial(_forward, forward, loss)


def loss_of(settings: "TrainSettings") -> Loss:
    """Return the job's loss, a function of outputs and targets. It may return a packed `CountedLoss`.

    Raises:
        RefusedError: if the user's function cannot be imported, or is not callable.
    """
    if settings.loss is None:
        return mean_loss
    found = code.load("train.loss", settings.loss, Path.cwd())
    if not callable(found):
        raise RefusedError(f"train.loss: {settings.loss} is a {type(found).__name__}; name a function")
    return partial(_checked, found, settings.loss)


def layers_of(model: nn.Module, settings: "TrainSettings") -> LayerStack:
    """Return the layers of a model as a stack with the same parameters and parameter names.

    Raises:
        RefusedError: if the model does not provide layers that run one after the other.
    """
    if isinstance(model, LayerStack):
        return model
    text = settings.model.make
    stages = getattr(model, "stages", None)
    if not callable(stages):
        others = ", ".join(name for name in MODES if name not in PIPELINES and name != TENSOR)
        raise RefusedError(
            f"{KEY}.make: {text} returned a {type(model).__name__}, which cannot be cut into layers: it is not an "
            f"nn.Sequential, and has no stages() that returns one; add stages(), or choose one of {others}"
        )
    found = code.called(f"{KEY}.make", f"stages() of {text}", stages)
    if not isinstance(found, nn.Sequential):
        raise RefusedError(f"{KEY}.make: stages() of {text} returned a {type(found).__name__}; return an nn.Sequential")
    return stack_of(_named_in(model, found, str(text)), loss_of(settings))


def stack_of(named: list[tuple[str, nn.Module]], loss: Loss) -> LayerStack:
    """Return a stack of named layers. Names may contain dots."""
    stack = LayerStack()
    stack._modules.update(dict(named))  # add_module refuses dots, but parameters must keep their names
    give_loss(stack, loss)
    return stack


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values (the sum of their bits) of parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        words = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {int(words.sum(dtype=torch.int64))}\n".encode())
    return digest.hexdigest()


def _forward(forward: Callable[[Tensor], Any], loss: Loss, inputs: Tensor, targets: Tensor | None = None) -> Any:
    outputs = forward(inputs)
    return outputs if targets is None else loss(outputs, targets)


def _checked(loss: Callable[..., Any], text: str, outputs: Any, targets: Tensor) -> Tensor:
    value = loss(outputs, targets)
    if (counted := counted_loss(loss, value, targets)) is not None:
        return counted.packed()
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise RefusedError(
            f"train.loss: {text} returned {shape}; return the mean loss as a scalar tensor, or a pair (sum, count)"
        )
    return value


def _named_in(model: nn.Module, found: nn.Sequential, text: str) -> list[tuple[str, nn.Module]]:
    """Return the layers of stages() with their names in the model.

    Raises:
        RefusedError: if a layer with parameters is not a module of the model, occurs twice, or is missing.
    """
    names = {id(module): name for name, module in model.named_modules()}
    named: dict[str, nn.Module] = {}
    for number, layer in enumerate(found):
        name = names.get(id(layer))
        if name is None and any(True for _ in layer.state_dict()):
            raise RefusedError(
                f"{KEY}.make: layer {number} of stages() of {text}, a {type(layer).__name__}, is not a module of the "
                "model itself, so its parameters have two names; keep it as an attribute of the model"
            )
        name = f"stage{number}" if name is None else name
        if name in named:
            raise RefusedError(f"{KEY}.make: stages() of {text} has {name} twice; list each layer once")
        named[name] = layer
    own = {id(each) for layer in named.values() for each in layer.parameters()}
    left = [name for name, each in model.named_parameters() if id(each) not in own]
    if left:
        raise RefusedError(f"{KEY}.make: stages() of {text} omits {left[0]}; every parameter must belong to a layer")
    return list(named.items())
