"""Lines that a plain DDP script needs to survive a killed node and a preemption: ours, Lightning Fabric's, Ray Train's.

    .venv/bin/python benchmarks/own_lines.py

Ours are counted from the examples: lines of ddp.py that plain.py lacks. The others are plain.py's additions as the
documentation of each says, with the same state: model, optimizer, scheduler, step. Counted are lines of code that are
added or changed; removed lines, blank ones, comments and docstrings are not. Neither is the command that starts them.

    Fabric  lightning.ai/docs/fabric/stable/fundamentals/convert.html and .../guide/checkpoint/checkpoint.html. It saves
            when it is told to, so the script watches SIGTERM; torchrun or Slurm starts it again.
    Ray     docs.ray.io/en/latest/train/getting-started-pytorch.html and .../train/user-guides/fault-tolerance.html
"""

import difflib
import json
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "jobs" / "examples" / "own"
FABRIC = """
import signal
from pathlib import Path
from lightning.fabric import Fabric
PATH, EVERY = Path("checkpoint.ckpt"), 100
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    fabric = Fabric(strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if PATH.exists():
        fabric.load(PATH, state)
    for step in range(state["step"], steps):
        fabric.backward(loss)
        state["step"] = step + 1
        stop = bool(fabric.all_reduce(torch.tensor(float(bool(asked))), reduce_op="sum"))
        if stop or state["step"] % EVERY == 0:
            fabric.save(PATH.with_suffix(".new"), state)
            if fabric.is_global_zero:
                PATH.with_suffix(".new").replace(PATH)
        if stop:
            sys.exit(75)
"""
RAY = """
import os
import tempfile
import ray.train
import ray.train.torch
EVERY = 100
def save(model, optimizer, scheduler, step, loss):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: each.state_dict() for name, each in objects.items()}
            torch.save({**state, "step": step}, os.path.join(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)
def train(config):
    steps = config["steps"]
    model = ray.train.torch.prepare_model(model)
    start, saved = 0, False
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            start = state["step"] + 1
    for step in range(start, steps):
        preempted = ray.train.get_preemption_info() is not None and not saved
        if preempted or (step + 1) % EVERY == 0:
            save(model, optimizer, scheduler, step, loss)
            saved = saved or preempted
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="train", storage_path="/shared/runs", failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()
"""


def added(plain: str, changed: str) -> list[str]:
    """Return the lines of code that `changed` has and `plain` lacks."""
    lines = [line[2:] for line in difflib.ndiff(plain.splitlines(), changed.splitlines()) if line.startswith("+ ")]
    return [line for line in lines if line.strip() and not line.lstrip().startswith(("#", '"""'))]


def main() -> None:
    """Count, and print a table and a JSON line."""
    plain, ddp = EXAMPLES / "plain.py", EXAMPLES / "ddp.py"
    if not plain.exists() or not ddp.exists():
        raise SystemExit(f"{EXAMPLES} lacks plain.py or ddp.py; run this script in a checkout that has both")
    rows = {
        "muster": added(plain.read_text(), ddp.read_text()),
        "Lightning Fabric": added("", FABRIC),
        "Ray Train": added("", RAY),
    }
    for name, lines in rows.items():
        print(f"{name:<18} {len(lines):3} lines added or changed")
    print(json.dumps({"benchmark": "own_lines", **{name: len(lines) for name, lines in rows.items()}}))


if __name__ == "__main__":
    main()
