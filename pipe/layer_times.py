"""Measure how long every layer of a model takes, forward and backward, on its own device, for balanced cuts."""

import time
from typing import Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

ROUNDS: Final = 5  # after one warm-up round


def layer_seconds(layers: nn.Sequential, inputs: Tensor) -> list[float]:
    """Measure one forward and backward of each layer, in seconds: the minimum over several rounds.

    Every round runs all layers, so that a disturbance does not hit one layer only. The minimum is used because other
    processes can only add time. Gradients, buffers and random states do not change. `inputs` is a micro-batch on the
    layers' device; the loss is not measured.
    """
    return [forward_s + backward_s for forward_s, backward_s in layer_times(layers, inputs)]


def layer_times(layers: nn.Sequential, inputs: Tensor) -> list[tuple[float, float]]:
    """Measure the forward and the backward of each layer separately, as `layer_seconds` does."""
    least = [(float("inf"), float("inf"))] * len(layers)
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        for turn in range(1 + ROUNDS):
            x = inputs.detach()
            for index, layer in enumerate(layers):
                (forward_s, backward_s), x = _once(layer, x)
                if turn:
                    least[index] = min(least[index][0], forward_s), min(least[index][1], backward_s)
    return least


def _once(layer: nn.Module, x: Tensor) -> tuple[tuple[float, float], Tensor]:
    """Return the seconds of a forward and of a backward, and the layer's output for `x`."""
    buffers = {name: each.clone() for name, each in layer.named_buffers()}
    entering = x.clone()  # a layer may overwrite its input, but not a leaf such as x
    begin_s = _now_s(x)
    y = functional_call(layer, buffers, (entering,))
    middle_s = _now_s(x)
    wanted = [each for each in (x, *layer.parameters()) if each.requires_grad]
    forward_s, backward_s = middle_s - begin_s, 0.0
    if y.requires_grad:
        gradient = torch.ones_like(y)
        begin_s = _now_s(x)
        torch.autograd.grad(y, wanted, gradient, allow_unused=True)  # unlike backward(), this does not write to .grad
        backward_s = _now_s(x) - begin_s
    return (forward_s, backward_s), y.detach().requires_grad_(y.is_floating_point())


def _now_s(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
