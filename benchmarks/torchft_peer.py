"""What failover.py starts beside Muster for `in_place`: one replica of the same model on the same batches, by torchft.

    torchft_peer.py FOLDER RANK REPLICAS LIGHTHOUSE

Every replica writes its pid to FOLDER/pid-RANK and a line "STEP REPLICAS TIME" for each step that all of its quorum
have committed to FOLDER/steps-RANK. Nothing is saved: a lost replica's state lives on in the others.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from faults.work import MODEL
from restart_peer import TRAIN
from torch.nn import functional

from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics.optim import build_optimizer


def main() -> None:
    """Train until killed."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    folder, rank, replicas, lighthouse = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    settings = TrainSettings.model_validate(TRAIN | {"model": MODEL})
    data = open_data(settings)
    bare = build_model(settings.model, vocabulary=data.vocabulary, seed=settings.seed)
    inner = build_optimizer(bare.parameters(), settings.optimizer)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=30)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: (bare.load_state_dict(state["model"]), inner.load_state_dict(state["optimizer"])),
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{rank}",
        hostname="127.0.0.1",
    )
    model, optimizer = DistributedDataParallel(manager, bare), Optimizer(manager, inner)
    each = settings.batch_size // replicas
    with (folder / f"steps-{rank}").open("a", buffering=1) as file:
        while True:
            before = manager.current_step()
            index = (torch.arange(each) + before * settings.batch_size + rank * each) % data.train_samples
            inputs, targets = data.train_batch(index, 0)
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()))
            optimizer.step()
            if manager.current_step() > before:
                file.write(f"{manager.current_step()} {manager.num_participants()} {time.time()!r}\n")


if __name__ == "__main__":
    main()
