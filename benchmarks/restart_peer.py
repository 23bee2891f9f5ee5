"""What failover.py starts under torchrun: the same model on the same batches, saved and resumed as people do.

    torchrun --nproc_per_node 4 --max-restarts 3 restart_peer.py FOLDER STEPS EVERY

Every rank writes its pid to FOLDER/pid-RANK-RESTART, rank 0 a line "RESTART STEP TIME" per step to FOLDER/steps. The
state goes to FOLDER/state.pt by torch.save under a temporary name, then renamed; a restarted rank loads it.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from faults.work import MODEL
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics.optim import build_optimizer

TRAIN = {
    "data": "synthetic",
    "mode": "ddp",
    "batch_size": 16,
    "evaluate": False,
    "optimizer": {"name": "adamw", "lr": 1e-3},
}


def main() -> None:
    """Train, from the saved state if there is one."""
    folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"pid-{rank}-{restart}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = TrainSettings.model_validate(TRAIN | {"model": MODEL})
    data = open_data(settings)
    bare = build_model(settings.model, vocabulary=data.vocabulary, seed=settings.seed)
    model = DistributedDataParallel(bare)
    optimizer = build_optimizer(bare.parameters(), settings.optimizer)
    state = folder / "state.pt"
    first = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    each = settings.batch_size // dist.get_world_size()
    for step in range(first, steps):
        index = (torch.arange(each) + step * settings.batch_size + rank * each) % data.train_samples
        inputs, targets = data.train_batch(index, 0)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()))
        optimizer.step()
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{restart} {step + 1} {time.time()!r}\n")
            if (step + 1) % every == 0:
                kept = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(kept, folder / "state.new")
                (folder / "state.new").replace(state)


if __name__ == "__main__":
    main()
