"""`plain.py`, made to survive failures: muster run -n 2 --restart ddp.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muster


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    run = muster.session()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    torch.manual_seed(dist.get_rank())
    state = run.state(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.steps(steps, state):
        inputs = torch.randn(32, 64)
        targets = inputs[:, :8].sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss, samples=len(inputs))

    if dist.get_rank() == 0:
        print(f"weights {sum(each.double().sum() for each in model.parameters()).item():.17g}")
    dist.monitored_barrier()  # `barrier` leaves work to a thread, and torch may abort if Python ends first


if __name__ == "__main__":
    main()
