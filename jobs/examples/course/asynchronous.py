"""Bulk-synchronous against asynchronous SGD with a parameter server: the price of waiting, and that of staleness.

    muster run -n 4 jobs/examples/course/asynchronous.py --slow 5
    torchrun --nproc-per-node 4 jobs/examples/course/asynchronous.py --slow 5

Rank 0 is the server, and the other W ranks are workers. A worker receives the parameters and the number of a part of
the data, and returns the gradient of the mean loss over this part. Only the server differs:

    bulk-synchronous    waits for a gradient of every worker     parameters -= lr * mean of the gradients
    asynchronous        takes the next gradient that arrives     parameters -= lr * gradient / W

    worker 1           part 0 │ part 2 │ part 3 │ part 4      │
    worker 2 (slow)    part 1                      │ part 5
    version          0        1        2        3  4          5

The *staleness* of a gradient is the number of updates since its worker got the parameters. In the drawing, that of
part 1 was computed for version 0 and changes version 3: its staleness is 3.

Both train on the same parts of the same data. Sources: Dean et al. 2012, Li et al. 2014.
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

END = -1  # sent in place of a part's number
FEATURES, SHOWN, BAR = 16, 6, 40
TEST_PART, TEST_SAMPLES = 2**40, 4096  # a part that no worker trains on


@dataclass
class Settings:
    """The options of the program."""

    steps: int  # of the bulk-synchronous training: each applies one gradient of every worker
    batch: int  # samples of a part
    lr: float
    ms: float  # milliseconds that a gradient takes at least, as if the model were larger
    slow: float  # the last worker takes so many times as long
    seed: int


@dataclass
class Training:
    """What the server recorded: after each update its seconds, the parts so far and the parameters; all staleness."""

    updates: list[tuple[float, int, Tensor]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)


def network(seed: int) -> nn.Module:
    """Build the same small network on every rank, in float64, so that sums in another order differ very little."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def part(number: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs (samples, FEATURES) and targets (samples, 1) of a part, which depend only on its number."""
    generator = torch.Generator().manual_seed(seed * 2**42 + number)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs[:, :4].sum(dim=1, keepdim=True))


def mean_loss(module: nn.Module, parameters: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of the network with these parameters, a flat tensor."""
    vector_to_parameters(parameters, module.parameters())
    inputs, targets = data
    return nn.functional.mse_loss(module(inputs), targets)


def gradient(module: nn.Module, parameters: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient of the mean loss, flat."""
    loss = mean_loss(module, parameters, data)
    return parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))


def work(settings: Settings) -> None:
    """Compute the gradients of the parts that the server hands out, until it sends END."""
    module = network(settings.seed)
    is_slow = dist.get_rank() == dist.get_world_size() - 1
    least_s = settings.ms / 1e3 * (settings.slow if is_slow else 1.0)
    message = torch.empty(parameters_to_vector(module.parameters()).numel() + 1, dtype=torch.float64)
    while True:
        dist.recv(message, src=0)  # the parameters, and the number of a part
        began, number = time.monotonic(), int(message[-1])
        if number == END:
            return
        found = gradient(module, message[:-1], part(number, settings.batch, settings.seed))
        time.sleep(max(0.0, began + least_s - time.monotonic()))
        dist.send(found, dst=0)


def serve(settings: Settings, *, waits: bool) -> Training:
    """Hand out all parts, and apply their gradients: those of all workers together if `waits`, else each by itself."""
    workers = range(1, dist.get_world_size())
    parts = iter(range(settings.steps * len(workers)))
    parameters = parameters_to_vector(network(settings.seed).parameters()).detach()
    training = Training([(0.0, 0, parameters.clone())])
    version_of: dict[int, int] = {}  # the version of the parameters that each worker has: len(training.updates)

    def hand_out(worker: int) -> None:
        version_of[worker] = len(training.updates)
        number = torch.tensor([next(parts, END)], dtype=torch.float64)
        dist.send(torch.cat([parameters, number]), dst=worker)

    began = time.monotonic()
    for worker in workers:
        hand_out(worker)
    while (applied := len(training.staleness)) < settings.steps * len(workers):
        total, arrived = torch.zeros_like(parameters), list[int]()
        for source in workers if waits else [None]:  # None: any worker
            found = torch.empty_like(parameters)
            arrived.append(dist.recv(found, src=source))
            total += found
        training.staleness += [len(training.updates) - version_of[worker] for worker in arrived]
        parameters -= settings.lr / len(workers) * total
        training.updates.append((time.monotonic() - began, applied + len(arrived), parameters.clone()))
        for worker in arrived:
            hand_out(worker)
    return training


def losses_of(training: Training, settings: Settings) -> list[float]:
    """Return the loss after each update on data that no worker trained on. The first one is that of the beginning."""
    module, test = network(settings.seed), part(TEST_PART, TEST_SAMPLES, settings.seed)
    with torch.no_grad():
        return [mean_loss(module, parameters, test).item() for _, _, parameters in training.updates]


def report(name: str, training: Training, losses: list[float]) -> None:
    """Print a histogram of the staleness, and the loss against updates, parts and seconds."""
    counts = Counter(training.staleness)
    mean = sum(training.staleness) / len(training.staleness)
    print(f"{name}: staleness of {len(training.staleness)} gradients: mean {mean:.2f}, max {max(counts)}")
    for staleness, count in sorted(counts.items()):
        print(f"  {staleness:3}  {count:5}  {'#' * -(-BAR * count // max(counts.values()))}")
    print("  update  part  seconds  loss")
    last = len(losses) - 1
    for update in sorted({last * row // SHOWN for row in range(SHOWN + 1)}):
        seconds, parts, _ = training.updates[update]
        print(f"  {update:6}  {parts:4}  {seconds:7.3f}  {losses[update]:8.6g}")


def reached(training: Training, losses: list[float], wanted: float) -> str:
    """Return how many updates, parts and seconds a training took until its loss was at most `wanted`; all, if never."""
    update = next((number for number, loss in enumerate(losses) if loss <= wanted), len(losses) - 1)
    seconds, parts, _ = training.updates[update]
    return f"{update} updates, {parts} parts, {seconds:.3f} s"


def read_options() -> Settings:
    """Read the options from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help="steps with one gradient of every worker")
    parser.add_argument("--batch", type=int, default=32, help="samples of a gradient")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--ms", type=float, default=4.0, help="milliseconds that a gradient takes at least")
    parser.add_argument("--slow", type=float, default=1.0, help="the last worker takes so many times as long")
    parser.add_argument("--seed", type=int, default=0)
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Train twice from the same parameters, and report on rank 0."""
    settings = read_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 2:
        raise SystemExit("needs a server and at least one worker: start 2 or more ranks")
    module = network(settings.seed)
    gradient(module, parameters_to_vector(module.parameters()).detach(), part(0, 1, settings.seed))  # loads kernels
    found = []
    for name, waits in (("bulk-synchronous", True), ("asynchronous", False)):
        dist.monitored_barrier()  # all ranks are ready when the clock starts
        if rank != 0:
            work(settings)
            continue
        training = serve(settings, waits=waits)
        losses = losses_of(training, settings)
        report(name, training, losses)
        found.append((name, training, losses))
    if rank == 0:
        wanted = max(losses[-1] for _, _, losses in found)
        print(f"to a loss of {wanted:.4g}")
        for name, training, losses in found:
            print(f"  {name:16}  {reached(training, losses, wanted)}")
    dist.monitored_barrier()  # `barrier` leaves work to a thread, and torch may abort if Python ends first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
