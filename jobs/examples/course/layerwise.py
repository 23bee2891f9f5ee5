"""FSDP and a pipeline by hand, layer by layer, with one `torch.autograd.grad` per layer.

    muster run -n 2 jobs/examples/course/layerwise.py
    muster verify jobs/examples/vgg11.yaml --with jobs/examples/course/layerwise.py:LayerwiseFSDP
    muster verify jobs/examples/vgg11.yaml --with jobs/examples/course/layerwise.py:LayerwisePipeline

    FSDP        forward     gather 1 · run 1 · free 1 | gather 2 · run 2 · free 2 | ...
                backward    ... | gather 2 · grad 2 · free 2 · scatter 2 | gather 1 · grad 1 · free 1 · scatter 1
    pipeline    stage 0     F0 F1 F2 F3 .. B0 B1 B2 B3       F3: forward of micro-batch 3
                stage 1     .. F0 F1 F2 F3 B0 B1 B2 B3

With P parameters on W ranks, FSDP stores P / W parameters, P / W gradients and P / W of each optimizer state on a rank,
and all parameters of the layer that runs. Per step a rank sends 3 (W - 1) / W P elements: it gathers parameters twice,
and reduces gradients once. Nothing overlaps, so both ways are slow.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss, pad

Run = tuple[Tensor, Tensor]  # a layer's input, which is a leaf of the layer's own autograd graph, and its output
STEPS, BATCH, MICROBATCHES = 5, 24, 4


def layers_of(modules: Iterable[nn.Module]) -> list[nn.Sequential]:
    """Join modules without parameters, such as activations, to the module before them. The first module has some."""
    layers: list[nn.Sequential] = []
    for module in modules:
        if layers and not list(module.parameters()):
            layers[-1].append(module)
        else:
            layers.append(nn.Sequential(module))
    return layers


def run(layer: Callable[[Tensor], Tensor], x: Tensor) -> Run:
    """Run a layer in an autograd graph of its own, which begins at the layer's input."""
    leaf = x.detach().requires_grad_(x.requires_grad)
    with torch.enable_grad():
        return leaf, layer(leaf)


def gradients_of(parameters: list[nn.Parameter], own: Run, gradient: Any) -> tuple[Sequence[Tensor], Any]:
    """Return the gradients of a layer's parameters and input. `gradient` is its output's, or None for a loss."""
    x, output = own
    wanted = [*parameters, x] if x.requires_grad else [*parameters]
    found = torch.autograd.grad(output, wanted, gradient, materialize_grads=True)
    return found[: len(parameters)], found[-1] if x.requires_grad else None


class FlatLayer:
    """A layer with its parameters in one flat tensor, padded to equal shards. This rank stores one shard."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = list(module.parameters())
        self.sizes = [each.numel() for each in self.parameters]
        self.flat = self.flatten([each.detach() for each in self.parameters])  # (ranks * shard,)
        parts = self.flat[: sum(self.sizes)].split(self.sizes)
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.data = part.view_as(parameter)
        self.shard = nn.Parameter(self.flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.free()

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors of the parameters' shapes; pad with zeros to a multiple of the number of ranks."""
        padding = -sum(self.sizes) % dist.get_world_size()
        return pad(torch.cat([each.flatten() for each in tensors]), (0, padding))

    def gather(self) -> None:
        """Gather the parameters from the shards of all ranks, into the same memory, which autograd refers to."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather(list(self.flat.chunk(dist.get_world_size())), self.shard.detach())

    def free(self) -> None:
        """Free the memory of the whole parameters."""
        self.flat.untyped_storage().resize_(0)

    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return this rank's shard of the mean gradient."""
        shard = torch.empty_like(self.shard)
        dist.reduce_scatter(shard, list(self.flatten(gradients).chunk(dist.get_world_size())))
        return shard / dist.get_world_size()


class LayerByLayer(torch.autograd.Function):
    """The whole network as one operation on its input and on the shards, so that `loss.backward()` works."""

    @staticmethod
    def forward(ctx: Any, layers: list[FlatLayer], x: Tensor, *shards: nn.Parameter) -> Tensor:
        ctx.layers, ctx.runs = layers, []
        for layer in layers:
            layer.gather()
            ctx.runs.append(run(layer.module, x))
            layer.free()
            x = ctx.runs[-1][1]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        of_shards = []
        for layer in reversed(ctx.layers):
            layer.gather()
            found, gradient = gradients_of(layer.parameters, ctx.runs.pop(), gradient)
            layer.free()
            of_shards.append(layer.reduce_scatter(found))
        return None, gradient, *reversed(of_shards)


class LayerwiseFSDP(nn.Module):
    """Shard parameters, gradients and optimizer state of a sequence. All ranks must begin with the same values."""

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()
        self.named = dict(module.named_parameters())
        self.layers = [FlatLayer(each) for each in layers_of(module)]
        if sum(len(layer.parameters) for layer in self.layers) > len(self.named):
            raise ValueError("two layers share a parameter, which would have two shards")
        self.shards = nn.ParameterList([layer.shard for layer in self.layers])  # what `parameters()` yields

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, LayerByLayer.apply(self.layers, x, *self.shards))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return all parameters by the names of the module; every rank must call this."""
        for layer in self.layers:
            layer.gather()
        whole = {name: each.detach().clone() for name, each in self.named.items()}
        for layer in self.layers:
            layer.free()
        return whole


class LayerwisePipeline:
    """GPipe: a rank has a slice of the layers, and runs all forwards, then all backwards."""

    def __init__(self, layers: nn.Sequential, microbatches: int) -> None:
        self.rank, self.last, self.microbatches = dist.get_rank(), dist.get_world_size() - 1, microbatches
        every = layers_of(layers)
        cuts = [len(every) * each // (self.last + 1) for each in range(self.last + 2)]
        self.layers = nn.Sequential(*every[cuts[self.rank] : cuts[self.rank + 1]])
        self.like = next(layers.parameters()).detach()[:0]  # has the dtype and device of received tensors

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's layers."""
        return self.layers.parameters()

    def train_step(self, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]) -> float | None:
        """Compute the gradients of the mean loss over the batch; return the loss on the last rank."""
        parts = zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        done = [self.forward(*part, loss) for part in parts]
        losses = [float(runs[-1][1].detach()) for runs in done] if self.rank == self.last else []
        for runs in done:
            self.backward(runs)
        return sum(losses) if self.rank == self.last else None

    def forward(self, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]) -> list[Run]:
        """Run the layers on one micro-batch, on the last rank also the loss; return all their runs."""
        runs: list[Run] = []
        x = inputs if self.rank == 0 else self.receive()
        for layer in self.layers:
            runs.append(run(layer, x))
            x = runs[-1][1]
        if self.rank == self.last:
            runs.append(run(lambda outputs: loss(outputs, targets) / self.microbatches, x))
        else:
            dist.send_object_list([x.shape], self.rank + 1)
            dist.send(x.detach().contiguous(), self.rank + 1)
        return runs

    def receive(self) -> Tensor:
        """Receive the shape of the previous stage's output, then its values."""
        shape: list[Any] = [None]
        dist.recv_object_list(shape, self.rank - 1)
        x = self.like.new_empty(shape[0])
        dist.recv(x, self.rank - 1)
        return x.requires_grad_()

    def backward(self, runs: list[Run]) -> None:
        """Run the backward of one micro-batch; add the gradients of the layers to `.grad`."""
        if self.rank == self.last:
            _, gradient = gradients_of([], runs.pop(), None)
        else:
            gradient = torch.empty_like(runs[-1][1])
            dist.recv(gradient, self.rank + 1)
        for layer in reversed(self.layers):
            parameters = list(layer.parameters())
            found, gradient = gradients_of(parameters, runs.pop(), gradient)
            for parameter, each in zip(parameters, found, strict=True):
                parameter.grad = each if parameter.grad is None else parameter.grad + each
        if gradient is not None:  # not on the first rank
            dist.send(gradient.contiguous(), self.rank - 1)


def build() -> nn.Sequential:
    """Build a net with the same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(parameters: Iterable[nn.Parameter], step: Callable[..., float], own: slice = slice(None)) -> list[float]:
    """Train on the rank's own samples of the same batches; return the losses. `step` computes gradients."""
    optimizer, draws, losses = torch.optim.SGD(parameters, lr=0.3, momentum=0.9), torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 5, generator=draws, dtype=torch.float64)[own]
        losses.append(step(inputs, inputs[:, :3].sin()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    loss = mse_loss(model(inputs), targets)
    loss.backward()
    return loss.item()


def total(value: float) -> float:
    """Sum a value over the ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone, fsdp, pipeline = build(), LayerwiseFSDP(build()), LayerwisePipeline(build(), MICROBATCHES)
    losses = {
        "one process": train(alone.parameters(), lambda x, y: backward(alone, x, y)),
        "FSDP": train(fsdp.parameters(), lambda x, y: total(backward(fsdp, x, y) / ranks), slice(rank, None, ranks)),
        "pipeline": train(pipeline.parameters(), lambda x, y: total(pipeline.train_step(x, y, mse_loss) or 0.0)),
    }
    if rank == 0:
        for number, layer in enumerate(fsdp.layers):
            print(f"layer {number}: {sum(layer.sizes)} parameters, {len(layer.shard)} on each of {ranks} ranks")
        print("step  " + "  ".join(f"{way:>11}" for way in losses))
        for step, row in enumerate(zip(*losses.values(), strict=True)):
            print(f"{step:4}  " + "  ".join(f"{loss:11.6f}" for loss in row))
            assert max(row) - min(row) < 1e-12
    dist.monitored_barrier()  # `barrier` leaves work to a thread, and torch may abort if Python ends first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
