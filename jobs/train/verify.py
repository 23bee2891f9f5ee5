"""`muster verify`: train a few steps as the job's mode does and as one process does, and compare everything.

All ranks run the mode; then rank 0 alone runs the reference on the same global batches and writes `verify.json`.
"""

import ctypes
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jobs import ranks
from jobs.modes import MODES, Exactness
from jobs.reports import Reporter
from jobs.rundir import write_json
from jobs.spec import Job, TrainSettings
from jobs.train.compare import Row, compare, gradient_tolerance, measured_tolerance
from jobs.train.evaluate import block_indices
from jobs.train.loading import move, move_inputs
from jobs.train.loop import Trainer, build_trainer
from jobs.train.main import FAILED, guarded, job_of, join, open_same_data, run_of, settings_of
from jobs.train.metrics import global_losses
from jobs.train.optim import set_learning_rate
from jobs.train.reference import Outcome, Reference, Setting, gradients_of, state_of
from jobs.train.sampling import total_steps
from jobs.train.world import World


def verify_rank(payload: Mapping[str, Any]) -> int:
    """Take part in a comparison; rank 0 returns 1 when it fails. `payload` is {"job": job as JSON, "steps": K}."""

    def work(reporter: Reporter) -> int:
        env = ranks.read(os.environ)
        job = reproducible(job_of(payload["job"]))
        record = verify(job, join(job, env, reporter), int(payload["steps"]))
        if record is None:
            return 0
        write_json(run_of(env).verify, record)
        return 0 if record["pass"] else FAILED

    return guarded(work)


def reproducible(job: Job) -> Job:
    """Ask for deterministic kernels: without them no two runs of anything agree on CUDA."""
    settings = settings_of(job).model_copy(update={"deterministic": True})
    return job.model_copy(update={"settings": settings})


def verify(job: Job, world: World, steps: int) -> dict[str, Any] | None:
    """Compare mode and reference over some steps: a collective. Returns the record on rank 0, None elsewhere."""
    data = open_same_data(job, world)
    trainer = build_trainer(settings_of(job), data, world)
    job_steps = max(total_steps(trainer.settings, trainer.plan), steps)
    setting = Setting(trainer.settings, data, trainer.plan, steps, job_steps, world.device, trainer.dtype)
    test_inputs = move_inputs(data.eval_batch(block_indices(0, data.eval_samples))[0], world.device, trainer.dtype)
    outcome = run_mode(trainer, setting, test_inputs)
    differing = ranks_that_differ(outcome.state, world)
    if world.rank != 0:
        return None
    return judge(job, world, setting, outcome, test_inputs, differing)


def run_mode(trainer: Trainer, setting: Setting, test_inputs: Tensor) -> Outcome:
    """Train some steps as the job does."""
    reader, engine = trainer.own_steps(), trainer.engine
    batches, losses, gradients = [], [], {}
    for step in range(setting.steps):
        trainer.clock.start()
        work = move(reader[step], trainer.world.device, trainer.dtype)
        set_learning_rate(engine.optimizer, setting.lr(step))
        batches.append(work.batch)
        losses.append(engine.train_step(step, work.shards))
        if step == 0:
            gradients = gradients_of(engine.module)
    engine.synchronize_buffers()
    output = engine.predict(test_inputs)
    return Outcome(global_losses(trainer.world, batches, losses), gradients, state_of(engine.module), output)


def judge(
    job: Job, world: World, setting: Setting, outcome: Outcome, test_inputs: Tensor, differing: dict[str, list[int]]
) -> dict[str, Any]:
    """Run the reference and write down how the mode compares."""
    reference = Reference(setting)
    wanted = reference.run(test_inputs)
    promise, why = promise_of(setting.settings, world.size)
    other = wanted if promise == "bitwise" else Reference(setting, reordered=True).run(test_inputs)
    rows = compare_outcomes(setting, promise, outcome, wanted, other, reference.magnitude)
    return {
        "job": job.name,
        "mode": mode_of(setting.settings),
        "exact": setting.settings.exact,
        "world_size": world.size,
        "virtual_ranks": setting.plan.virtual_ranks,
        "device": world.device.type,
        "precision": setting.settings.precision,
        "steps": setting.steps,
        "batch_size": setting.plan.batch_size,
        "class": promise,
        "why": why,
        "batch_norm": "running statistics are those of virtual rank 0",
        "losses": [{"step": i + 1, "mode": a, "reference": b} for i, (a, b) in enumerate(_pairs(outcome, wanted))],
        "rows": [row.record() for row in rows],
        "differing_ranks": differing,
        "pass": all(row.ok for row in rows) and not differing,
    }


def compare_outcomes(
    setting: Setting,
    promise: Exactness,
    found: Outcome,
    wanted: Outcome,
    reordered: Outcome,
    magnitude: Mapping[str, float],
) -> list[Row]:
    """Compare the first gradients, parameters, buffers, losses and the output."""
    virtual_ranks, dtype = setting.plan.virtual_ranks, setting.dtype

    def allowed(value: Tensor, other: Tensor) -> float:
        if promise == "bitwise":
            return 0.0
        return measured_tolerance(value, other, steps=setting.steps, virtual_ranks=virtual_ranks, dtype=dtype)

    rows = []
    for name, gradient in wanted.gradients.items():
        bound = 0.0 if promise == "bitwise" else gradient_tolerance(magnitude[name], virtual_ranks, dtype)
        rows.append(compare(name, "gradient", found.gradients[name], gradient, bound))
    for name, value in wanted.state.items():
        kind = "parameter" if name in wanted.gradients else "buffer"
        rows.append(compare(name, kind, found.state[name], value, allowed(value, reordered.state[name])))
    losses = [torch.tensor(each.losses, dtype=torch.float64) for each in (found, wanted, reordered)]
    rows.append(compare("loss of each step", "loss", losses[0], losses[1], allowed(losses[1], losses[2])))
    output_bound = allowed(wanted.output, reordered.output)
    rows.append(compare("output on a test batch", "output", found.output, wanted.output, output_bound))
    return rows


def promise_of(settings: TrainSettings, world_size: int) -> tuple[Exactness, str]:
    """Return the class that a mode is held to, and why."""
    if settings.exact:
        return "bitwise", "exact: shards are summed in order and divided once, as one process does"
    mode = mode_of(settings)
    promise = MODES[mode].exactness(world_size)
    reason = "the sum takes the reference's order" if promise == "bitwise" else "the sum may take another order"
    return promise, f"{mode} on {world_size} rank(s): {reason}"


def mode_of(settings: TrainSettings) -> str:
    """Name the mode of a job; one that writes its split out has the mode of its sync."""
    if settings.parallel is None:
        return settings.mode
    return "single" if settings.parallel.sync == "none" else settings.parallel.sync


def ranks_that_differ(state: Mapping[str, Tensor], world: World) -> dict[str, list[int]]:
    """Name the ranks whose parameters or buffers are not bit for bit those of rank 0: a collective."""
    digests = b"".join(digest(tensor) for tensor in state.values())
    mine = torch.tensor(list(digests), dtype=torch.uint8, device=world.device).view(len(state), -1)  # (tensors, 32)
    theirs = world.gather(mine)
    differing = {
        name: [rank for rank, each in enumerate(theirs) if not torch.equal(each[row], theirs[0][row])]
        for row, name in enumerate(state)
    }
    return {name: wrong for name, wrong in differing.items() if wrong}


def digest(tensor: Tensor) -> bytes:
    """Return the sha256 of a tensor's bytes."""
    whole = tensor.detach().cpu().contiguous()
    size = whole.numel() * whole.element_size()
    view = (ctypes.c_char * size).from_address(whole.data_ptr()) if size else b""
    return hashlib.sha256(view).digest()


def _pairs(outcome: Outcome, wanted: Outcome) -> list[tuple[float, float]]:
    return list(zip(outcome.losses, wanted.losses, strict=True))
