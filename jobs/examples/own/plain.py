"""A plain PyTorch training script: torchrun --nproc-per-node 2 plain.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        inputs = torch.randn(32, 64)
        targets = inputs[:, :8].sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.6f}")

    if dist.get_rank() == 0:
        print(f"weights {sum(each.double().sum() for each in model.parameters()).item():.17g}")
    dist.monitored_barrier()  # `barrier` leaves work to a thread, and torch may abort if Python ends first


if __name__ == "__main__":
    main()
