"""A loop over epochs with a DataLoader: muster run -n 2 --restart epochs.py, or alone: python epochs.py"""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import muster


def samples(count: int, seed: int) -> TensorDataset:
    """Make points in a plane, and label each by whether it lies in a ring."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, ((points.norm(dim=1) - 1.2).abs() < 0.5).float().unsqueeze(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs

    run = muster.session()
    if run.world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    if run.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    train, held_out = samples(3001, seed=1), samples(1000, seed=2)
    sampler = run.sampler(train, batch_size=16)  # on each rank
    loader = DataLoader(train, batch_sampler=sampler)
    state = run.state(model=model, optimizer=optimizer, sampler=sampler, best=0.0)
    for epoch in run.epochs(epochs, state):
        for points, inside in run.batches(loader):
            loss = nn.functional.binary_cross_entropy_with_logits(model(points), inside)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss, samples=len(points))
        with torch.no_grad():
            right = ((model(held_out.tensors[0]) > 0) == (held_out.tensors[1] > 0)).float().mean().item()
        state.best = max(state.best, right)
        run.log(accuracy=right)
        run.logger.info(f"epoch {epoch}  accuracy {right:.4f}  best {state.best:.4f}")

    assert math.isfinite(state.best)
    if run.is_main:
        torch.save(model.state_dict(), run.path("model.pt"))


if __name__ == "__main__":
    main()
