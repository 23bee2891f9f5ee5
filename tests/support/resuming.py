"""Attempts of one run on real ranks, each going on from what the one before has saved."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.models.shapes import POOL, VGG_SHAPES, VggShape
from muster.jobs.node import page
from muster.jobs.node.page import Page
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.resume import Resume
from muster.jobs.spec.job import Job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train import data
from muster.jobs.train.data import image_sets
from muster.jobs.train.data.images import Images
from muster.jobs.train.main import TrainStart, make_deterministic, train_in
from muster.jobs.world.world import World

ROOT = Path(__file__).parents[2]
TINY_VGG = VggShape("vgg-tiny", (8, POOL, 8, POOL, 16, POOL, 16, POOL, 16, POOL))
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}
COSINE = {"name": "cosine", "warmup_steps": 2}
VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 240, "steps": 8, "optimizer": SGD, "schedule": COSINE}
VGG["evaluate"] = False
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}
SMALL_GPT = {"d_model": 32, "d_ff": 64, "layers": 2, "heads": 2, "context": 32}
GPT = {
    "model": {**SMALL_GPT, "dropout": 0.1},
    "data": "synthetic",
    "batch_size": 12,
    "steps": 8,
    "optimizer": ADAMW,
    "evaluate": False,
}
AT_THE_END = {"every_steps": 1000}


def few_digits(whole: Images, train: int, evaluation: int) -> Images:
    """Return a data set of the first samples of each part, whose passes cost less."""
    return replace(whole, train=whole.train.part(range(train)), evaluation=whole.evaluation.part(range(evaluation)))


def attempt(
    world: World,
    folder: str,
    settings: dict,
    number: int = 0,
    stop_at: int | None = None,
    checkpoint: dict | None = None,
    few: tuple[int, int] | None = None,
) -> int:
    """Make attempt `number` of a run, from the newest checkpoint; return this rank's exit code.

    `few`: how many digits there are to train on and to evaluate.
    """
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    if few:
        data.OPENERS["digits"] = lambda settings: few_digits(image_sets.open_digits(settings), *few)
    page.own = Page()
    if stop_at is not None:
        page.own.stop_at = stop_at
    train = TrainSettings.model_validate(settings)
    make_deterministic(train)
    job = Job.model_validate({"kind": "train", "settings": train, "checkpoint": checkpoint or AT_THE_END})
    Path(folder).mkdir(exist_ok=True)
    run = RunDir(Path(folder))
    chosen = newest_good(run, mark=False) if number else None
    resume = Resume(chosen.folder.name, chosen.manifest.step, chosen.manifest.sha256) if chosen else None
    return train_in(TrainStart(run, number, resume), job, world, Reporter({}))


def tensors(folder: Path) -> dict[str, bytes]:
    """Return every tensor of a run's newest checkpoint, as bytes."""
    chosen = newest_good(RunDir(folder))
    found = {}
    with CheckpointReader(chosen.folder, chosen.manifest) as reader:
        for name in reader.names():
            room = bytearray(reader.piece(name).nbytes)
            reader.read_into(reader.piece(name), room)
            found[name] = bytes(room)
    return found


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every tensor of a run's newest checkpoint."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in tensors(folder).items()}


def agree_within_rounding(parts: Path, whole: Path) -> None:
    """Check that the newest checkpoints of two runs in float64 have the same tensors, within 1e-12."""
    theirs, ours = tensors(whole), tensors(parts)
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        if name.endswith("/step"):
            assert mine == theirs[name]
            continue
        pairs = zip(struct.iter_unpack("<d", mine), struct.iter_unpack("<d", theirs[name]), strict=True)
        assert max(abs(a - b) for (a,), (b,) in pairs) < 1e-12, name


def attempt_apart(folder: Path, settings: dict, device: str = "cuda:0", **more: int) -> list:
    """Make an attempt in a process of its own, alone on a device; return its exit code and what it saved, as hashes."""
    script = "; ".join(
        [
            "import sys, json, torch",
            "from support.resuming import attempt, hashes",
            "from muster.jobs.world.world import World",
            "from pathlib import Path",
            "alone = World(0, 1, None, torch.device(sys.argv[4]))",
            "settings, more = json.loads(sys.argv[2]), json.loads(sys.argv[3])",
            "code = attempt(alone, sys.argv[1], settings, checkpoint={'every_steps': 2}, **more)",
            "print(json.dumps([code, hashes(Path(sys.argv[1]))]))",
        ]
    )
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", script, str(folder), json.dumps(settings), json.dumps(more), device]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    answer: list = json.loads(done.stdout.splitlines()[-1])
    return answer
