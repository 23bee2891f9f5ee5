"""Sharded parameters (FSDP2), saved in pieces that any number of ranks restores: muster run -n 2 --restart fsdp2.py"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import muster


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the block: (samples, width)."""
        outputs: Tensor = inputs + self.down(nn.functional.gelu(self.up(inputs)))
        return outputs


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Draw the samples of a step, and return this rank's share of them."""
    inputs = torch.randn(48, 32, generator=torch.Generator().manual_seed(step))
    targets = inputs.roll(1, dims=1)
    return inputs[rank::ranks], targets[rank::ranks]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    run = muster.session()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(3)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    state = run.state(model=model, optimizer=optimizer)
    for step in run.steps(steps, state):
        inputs, targets = batch(step, run.rank, run.world_size)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss, samples=len(inputs))


if __name__ == "__main__":
    main()
