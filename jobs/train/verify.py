"""`muster verify`: train a few steps with the job's mode and in one process, and compare everything.

All ranks run the mode. Then rank 0 runs the reference on the same global batches and writes `verify.json`.
"""

import ctypes
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from muster.jobs.basics.files import write_json
from muster.jobs.basics.sections import replaced
from muster.jobs.basics.words import counted
from muster.jobs.hosts import ranks
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.expand import split_text
from muster.jobs.spec.modes import MODES, Exactness
from muster.jobs.spec.plain import plain_job
from muster.jobs.train.compare import TensorComparison, compare, max_difference
from muster.jobs.train.data.loading import move, move_inputs
from muster.jobs.train.data.sampling import total_steps
from muster.jobs.train.evaluate import block_indices
from muster.jobs.train.main import join, open_same_data, run_of, settings_of
from muster.jobs.train.metrics import global_losses
from muster.jobs.train.numerics.optim import set_learning_rate
from muster.jobs.train.reference import LOSS, Reference, Setting, TrainingOutcome, tensors_in
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.world.guard import FAILED, guarded
from muster.jobs.world.world import World

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.train import TrainSettings

NOWHERE: Final[Mapping[str, float]] = MappingProxyType({})


def verify_rank(payload: Mapping[str, Any]) -> int:
    """Run `verify` on one rank; rank 0 returns 1 if it fails. `payload`: {"job": serialized job, "steps": K}."""

    def work(reporter: Reporter) -> int:
        env = ranks.read(os.environ)
        job = reproducible(plain_job(payload["job"]))
        record = verify(job, join(job, env, reporter), int(payload["steps"]))
        if record is None:
            return 0
        write_json(run_of(env).verify, record)
        return 0 if record["pass"] else FAILED

    return guarded(work)


def reproducible(job: "Job") -> "Job":
    """Request deterministic kernels; without them, no two runs agree on CUDA."""
    return replaced(job, settings=replaced(settings_of(job), deterministic=True))


def verify(job: "Job", world: World, steps: int) -> dict[str, Any] | None:
    """Train some steps in the mode and in one process, and compare the results: a collective.

    Returns the record on rank 0, None elsewhere.
    """
    data = open_same_data(job, world)
    trainer = build_trainer(settings_of(job), data, world)
    job_steps = max(total_steps(trainer.settings, trainer.plan), steps)
    setting = Setting(
        trainer.settings,
        data,
        trainer.plan,
        steps,
        job_steps,
        world.device,
        trainer.dtype,
        trainer.world.tensor,
        shares_weights=bool(trainer.engine.model.whole.aliases),
    )
    if data.eval_samples:
        inputs, _ = data.eval_batch(block_indices(0, data.eval_samples))
    else:
        inputs, _ = data.train_batch(block_indices(0, data.train_samples), 0)
    test_inputs = move_inputs(inputs, world.device, trainer.dtype)
    outcome = run_mode(trainer, setting, test_inputs)
    differing = ranks_that_differ(outcome.state, world)
    if world.rank != 0:
        return None
    return judge(job, world, setting, outcome, test_inputs, differing)


def run_mode(trainer: Trainer, setting: Setting, test_inputs: Tensor) -> TrainingOutcome:
    """Train some steps as the job does; only rank 0 keeps the gradients."""
    reader, engine = trainer.own_steps(), trainer.engine
    batches, losses, gradients = [], [], []
    for step in range(setting.steps):
        trainer.clock.start()
        work = move(reader[step], trainer.world.device, trainer.dtype)
        set_learning_rate(engine.optimizer, setting.lr(step))
        batches.append(work.batch)
        losses.append(engine.train_step(step, work.shards))
        whole = engine.model.full_gradients()
        if trainer.world.rank == 0:
            gradients.append(whole)
    engine.model.synchronize_buffers()
    outputs = tensors_in(engine.predict(test_inputs))
    return TrainingOutcome(global_losses(trainer.world, batches, losses), gradients, engine.model.full_state(), outputs)


def judge(
    job: "Job",
    world: World,
    setting: Setting,
    outcome: TrainingOutcome,
    test_inputs: Tensor,
    differing: dict[str, list[int]],
) -> dict[str, Any]:
    """Run the reference and return the record of the comparison."""
    promise, why = promise_of(setting.settings, world.size, shares_weights=setting.shares_weights)
    alone = Reference(setting).run(test_inputs)
    if promise == "bitwise":
        rows = compare_outcomes(outcome, alone, None)
    else:
        following = Reference(setting)
        wanted = following.run(test_inputs, outcome.gradients)
        rows = compare_outcomes(outcome, wanted, following.bounds, alone, following.reach)
    losses = zip(outcome.losses, alone.losses, strict=True)
    return {
        "job": job.name,
        "mode": setting.settings.mode_name,
        "split": split_text(setting.settings),
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
        "losses": [{"step": i + 1, "mode": mode, "reference": one} for i, (mode, one) in enumerate(losses)],
        "rows": [row.record() for row in rows],
        "differing_ranks": differing,
        "pass": all(row.ok for row in rows) and not differing,
    }


def compare_outcomes(
    found: TrainingOutcome,
    wanted: TrainingOutcome,
    bounds: Sequence[Mapping[str, float]] | None,
    alone: TrainingOutcome | None = None,
    reach: Mapping[str, float] = NOWHERE,
) -> list[TensorComparison]:
    """Compare gradients within their bounds (None: bitwise), and parameters and buffers bitwise.

    Losses and output are compared bitwise too, unless `reach` limits their deviation by rounding. `alone` is the
    independent reference, for the drift.
    """
    rows = [
        worst(
            [compare(name, "gradient", mine[name], theirs[name], bound.get(name, 0.0)) for mine, theirs, bound in steps]
        )
        for steps in [list(zip(found.gradients, wanted.gradients, bounds or [{}] * len(found.gradients), strict=True))]
        for name in wanted.gradients[0]
    ]
    drifts = _named(alone) if alone is not None else {}
    wanted_by_name = _named(wanted)
    for name, value in _named(found).items():
        kind = "parameter" if name in wanted.gradients[0] else "buffer"
        kind = "loss" if name == LOSS else "output" if name in wanted.outputs else kind
        row = compare(name, kind, value, wanted_by_name[name], reach.get(name, 0.0))
        rows.append(replace(row, drift=max_difference(value, drifts[name])) if drifts else row)
    return rows


def worst(rows: Sequence[TensorComparison]) -> TensorComparison:
    """Return the row of the step that is nearest to its bound, or farthest beyond it."""
    return max(rows, key=lambda row: (not row.ok, row.difference / row.tolerance if row.tolerance else row.difference))


def _named(outcome: TrainingOutcome) -> dict[str, Tensor]:
    return {**outcome.state, LOSS: torch.tensor(outcome.losses, dtype=torch.float64), **outcome.outputs}


def promise_of(settings: "TrainSettings", world_size: int, *, shares_weights: bool) -> tuple[Exactness, str]:
    """Return how closely a mode must match the reference (a class of `compare.py`), and why.

    `shares_weights`: the model uses a weight in several places.
    """
    if settings.exact:
        what = (
            "micro-batches are added in order"
            if settings.is_pipeline
            else "shards are summed in order and divided once"
        )
        return "bitwise", f"exact: {what}, as in one process"
    where = f"{split_text(settings)} on {counted(world_size, 'rank')}"
    if settings.split(world_size).tensor > 1:
        return "near", f"{where}: matrix products are summed over ranks, so all later results may differ by rounding"
    if settings.communication_dtype is not None and world_size > 1:
        return "tight", f"{where}: gradients are sent in {settings.communication_dtype}, so they differ by its rounding"
    split = settings.split(world_size)
    if split.schedule == "terapipe":
        return "near", f"{where}: attention and gradients add up the slices of a sequence one after another"
    if shares_weights and split.schedule and split.pipe * split.chunks > 1:
        return "tight", f"{where}: stages share a weight, and the gradients of its uses are summed at the end of a step"
    promise = MODES[settings.mode_name].exactness(world_size)
    if settings.is_pipeline and settings.split(world_size).data > 1:
        promise = "tight"
    if promise == "bitwise":
        return promise, f"{where}: the sum has the same order as the reference's"
    return promise, f"{where}: the sum may have another order, so gradients may differ by rounding"


def ranks_that_differ(state: Mapping[str, Tensor], world: World) -> dict[str, list[int]]:
    """Return the ranks whose parameters or buffers are not bitwise equal to rank 0's: a collective."""
    digests = b"".join(digest(tensor) for tensor in state.values())
    mine = torch.tensor(list(digests), dtype=torch.uint8, device=world.device).view(len(state), -1)  # (tensors, 32)
    theirs = world.gather(mine)
    differing = {
        name: [rank for rank, each in enumerate(theirs) if not torch.equal(each[row], theirs[0][row])]
        for row, name in enumerate(state)
    }
    return {name: wrong for name, wrong in differing.items() if wrong}


def digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's bytes."""
    whole = tensor.detach().cpu().contiguous()
    size = whole.numel() * whole.element_size()
    view = (ctypes.c_char * size).from_address(whole.data_ptr()) if size else b""
    return hashlib.sha256(view).digest()
