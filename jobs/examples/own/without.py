"""A script without a session, which saves, restores and stops by itself.

muster run -n 2 --restart without.py     torchrun --nproc-per-node 2 without.py
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

REQUEUE = 75  # exit code for "stopped on request, not finished", which sessions also use
stopping = False


def ask_to_stop(number: int, frame: FrameType | None) -> None:
    """Record the signal; the loop stops after the current step."""
    global stopping
    stopping = True


def reason() -> str:
    """Return why the ranks must stop, from a file that Muster writes before it sends SIGTERM."""
    try:
        told = json.loads(Path(os.environ["MUSTER_STOP_FILE"]).read_text())
    except (KeyError, FileNotFoundError):
        return "SIGTERM"
    return f"{told['reason']}: {told['message']}"


def agreed_to_stop() -> bool:
    """Return whether any rank was asked to stop: a collective, so that all ranks stop after the same step."""
    asked = torch.tensor(float(stopping))
    dist.all_reduce(asked, dist.ReduceOp.MAX)
    return bool(asked)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Draw a rank's samples of a step. They depend only on these two numbers, so a restart draws the same samples."""
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs[:, :8].sum(dim=1, keepdim=True)


def save(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint, so that it is either complete or does not exist."""
    unfinished = path.with_suffix(".new")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    signal.signal(signal.SIGTERM, ask_to_stop)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    path = Path(os.environ.get("MUSTER_FILES", ".")) / "without.pt"
    first = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        if dist.get_rank() == 0:
            print(f"continues after step {first}", flush=True)

    for step in range(first, steps):
        inputs, targets = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(parallel(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stops = agreed_to_stop()
        if dist.get_rank() == 0 and (stops or (step + 1) % 50 == 0):
            save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
            print(f"step {step + 1}  loss {loss.item():.6f}, saved", flush=True)
        if stops:
            print(f"rank {dist.get_rank()} stops after step {step + 1}: {reason()}", flush=True)
            sys.exit(REQUEUE)

    if dist.get_rank() == 0:
        print(f"weights {sum(each.double().sum() for each in model.parameters()).item():.17g}", flush=True)
    dist.monitored_barrier()  # `barrier` leaves work to a thread, and torch may abort if Python ends first


if __name__ == "__main__":
    main()
