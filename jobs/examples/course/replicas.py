"""One process with several replicas of a model, as in torch.nn.DataParallel, against DDP with as many ranks.

    muster run -n 2 jobs/examples/course/replicas.py [--steps 20] [--width 1024]
    torchrun --nproc-per-node 2 jobs/examples/course/replicas.py

    first device    batch      weights       outputs ─ loss ─ their gradients    sum of gradients ─ optimizer step
                      │          │              ^                    │                  ^
    every device      └> a part  └> a copy ─ forward                 └> backward ───────┘

Rank 0 trains alone, on the whole batches, and then with replicas, while the other ranks wait. Then all ranks train with
DDP. All three start from the same weights and read the same batches. A replica has a thread and a GPU. If there are
fewer GPUs than ranks, all use CPUs, and the threads of rank 0 run on the cores of all ranks.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, FEATURES, CLASSES = 32, 256, 10  # samples of a batch for each rank


class Replicas:
    """A module on the first device, and copies of it that are overwritten in every step."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.modules = [module, *(deepcopy(module).to(device) for device in devices[1:])]
        self.threads = ThreadPoolExecutor(len(devices))
        self.sent = self.received = 0  # bytes that left and reached the first device

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, and add its gradients to those of the first module."""
        self._replicate()
        outputs = list(self.threads.map(forward, self.modules, self._scatter(inputs)))
        gathered = torch.cat([outputs[0].detach(), *(self._receive(each.detach()) for each in outputs[1:])])
        loss = nn.functional.cross_entropy(gathered.requires_grad_(), targets)
        (gradient,) = torch.autograd.grad(loss, gathered)
        # On GPUs, autograd has a thread for each device. On CPUs, the backward runs in the thread that calls it.
        list(self.threads.map(lambda output, part: output.backward(part), outputs, self._scatter(gradient)))
        self._reduce()
        return loss.detach()

    def _scatter(self, batch: Tensor) -> list[Tensor]:
        parts = batch.chunk(len(self.devices))
        return [parts[0], *map(self._send, parts[1:], self.devices[1:])]

    @torch.no_grad()
    def _replicate(self) -> None:
        for module, device in zip(self.modules[1:], self.devices[1:], strict=True):
            for mine, first in zip(module.parameters(), self.modules[0].parameters(), strict=True):
                mine.copy_(self._send(first, device))

    def _reduce(self) -> None:
        for module in self.modules[1:]:
            for mine, first in zip(module.parameters(), self.modules[0].parameters(), strict=True):
                assert mine.grad is not None
                assert first.grad is not None
                first.grad += self._receive(mine.grad)
                mine.grad = None

    def _send(self, tensor: Tensor, device: torch.device) -> Tensor:
        self.sent += tensor.nbytes
        return tensor.to(device)

    def _receive(self, tensor: Tensor) -> Tensor:
        self.received += tensor.nbytes
        return tensor.to(self.devices[0])


@dataclass
class Trained:
    """The losses and seconds of all steps, the final parameters, and the bytes of a step at the busiest device."""

    losses: Tensor
    seconds: list[float]
    parameters: list[Tensor]
    sent: int = 0
    received: int = 0

    def difference(self, other: "Trained") -> float:
        """Return the largest difference of a loss or a parameter."""
        pairs = zip([self.losses, *self.parameters], [other.losses, *other.parameters], strict=True)
        return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def forward(module: nn.Module, part: Tensor) -> Tensor:
    """Run a module in this thread, which starts without a CUDA context."""
    if part.is_cuda:
        torch.cuda.set_device(part.device)
    outputs: Tensor = module(part)
    return outputs


def build(width: int) -> nn.Module:
    """Return the same model in every call."""
    torch.manual_seed(0)
    inner = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), *inner, nn.Linear(width, CLASSES))


def batches(args: argparse.Namespace, ranks: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield whole batches of random samples; the class of a sample is its largest of the first features."""
    for step in range(args.steps):
        inputs = torch.randn(SAMPLES * ranks, FEATURES, generator=torch.Generator().manual_seed(step)).to(device)
        yield inputs, inputs[:, :CLASSES].argmax(dim=1)


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch, and add its gradients to those of the model."""
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, data: Iterator[tuple[Tensor, Tensor]], step: Callable[[Tensor, Tensor], Tensor]) -> Trained:
    """Train a model. `step` adds the gradients of a batch and returns its mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, seconds = [], []
    for inputs, targets in data:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = step(inputs, targets)
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    parameters = [each.detach().cpu() for each in model.parameters()]
    return Trained(torch.tensor(losses, dtype=torch.float64), seconds, parameters)


def with_replicas(args: argparse.Namespace, devices: Sequence[torch.device], cores: set[int]) -> Trained:
    """Train with replicas, whose threads run on these cores."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # new threads inherit it
    model = build(args.width).to(devices[0])
    replicas = Replicas(model, devices)
    trained = train(model, batches(args, len(devices), devices[0]), replicas.step)
    os.sched_setaffinity(0, mine)
    trained.sent, trained.received = replicas.sent // args.steps, replicas.received // args.steps
    return trained


def with_ddp(args: argparse.Namespace, device: torch.device) -> Trained:
    """Train with DDP: a collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="nccl") if device.type == "cuda" else dist.group.WORLD
    model = DistributedDataParallel(build(args.width).to(device), process_group=group)
    data = batches(args, ranks, device)
    parts = ((inputs.chunk(ranks)[rank], targets.chunk(ranks)[rank]) for inputs, targets in data)
    trained = train(model, parts, partial(backward, model))
    dist.all_reduce(trained.losses)
    trained.losses /= ranks
    # Every rank of a ring's all-reduce sends and receives as many bytes.
    trained.sent = trained.received = 2 * (ranks - 1) * sum(each.nbytes for each in trained.parameters) // ranks
    return trained


def main() -> None:
    """Train in three ways and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024, help="width of the model's inner layers")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    on_gpus = torch.cuda.device_count() >= ranks
    devices = [torch.device("cuda", each) if on_gpus else torch.device("cpu") for each in range(ranks)]
    of_ranks: list[set[int]] = [set()] * ranks
    dist.all_gather_object(of_ranks, os.sched_getaffinity(0))
    if rank == 0:
        model = build(args.width).to(devices[0])
        alone = train(model, batches(args, ranks, devices[0]), partial(backward, model))
        threads = with_replicas(args, devices, set().union(*of_ranks))
    dist.monitored_barrier()  # the other ranks sleep here until rank 0 has finished
    processes = with_ddp(args, devices[rank])
    if rank == 0:
        nbytes = sum(each.nbytes for each in alone.parameters)
        print(f"{ranks} ranks on {devices[0].type}, {nbytes / 1e6:.3f} MB of parameters, {args.steps} steps")
        print("             ms a step  last loss  from one process  busiest device sends  receives")
        for name, each in {"one process": alone, "replicas": threads, "ddp": processes}.items():
            print(
                f"{name:11}  {1e3 * statistics.median(each.seconds):9.2f}  {each.losses[-1]:9.4f}"
                f"  {each.difference(alone):16.1e}  {each.sent / 1e6:17.3f} MB  {each.received / 1e6:.3f} MB"
            )
    dist.monitored_barrier()  # `barrier` leaves work to a thread, and torch may abort if Python ends first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
