"""The rank side of `gpu_throughput.py`: builds the sides of one row, compares their losses, measures them in turns.

    build, warm up, compare losses     every side; one that fails is named and left out
    A B C  C B A  A B C ...            a block of steps each, between two CUDA events and two synchronizations

Rank 0 prints one line of JSON for everything that happens, so that a row that dies later keeps what it had.
"""

import gc
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import gpu_stage
import torch
import torch.distributed as dist
from gpu_pipes import NORMS_WITHIN, PipeRunner, distances, known_loss
from gpu_sides import LoopSide, Scene, Side, Spec, batches_of, build_side
from ranks import say
from torch import Tensor

WARM_STEPS = 8
LOSSES_WITHIN = 0.02  # of the loss: bf16 keeps three digits
MEMORY_STEPS = 3
# Of an element, between two steps of AdamW: the parameter, or of one in bfloat16 the master alone, and both momenta.
STATE_BYTES = {"fp32": 12, "bf16": 12, "pure_bf16": 12}
PROFILED_STEPS = 4
CEILING = 8192


class Stage(gpu_stage.Stage):
    """One rank of a row."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(smoke=bool(order["smoke"]))
        where = (self.rank, self.ranks, self.device, self.smoke)
        how = (bool(order["stock"]), order["microbatches"], order["copies"])
        self.scene = Scene(order["model"], order["batch"], *where, *how)
        self.began_s = time.monotonic()

    def say(self, what: str, **more: Any) -> None:
        """Print one line of JSON on rank 0, with the seconds since the ranks have met."""
        say(what, at_s=round(time.monotonic() - self.began_s, 1), **more)

    def timed(self, work: Callable[[], None]) -> float:
        """Return the seconds of some work on this rank's device."""
        self.synchronize()
        self.all(0.0)
        if self.scene.device.type != "cuda":
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


class Runner:
    """One side that runs: knows where it is in the stream of batches."""

    def __init__(self, spec: Spec, stage: Stage, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.spec = spec
        self.stage = stage
        self.batches = batches
        self.done = 0
        self.plays = not spec.alone or stage.scene.rank == 0
        self.side: Side | None = build_side(spec, stage.scene) if self.plays else None

    def run(self, steps: int) -> Tensor | None:
        """Train some steps; return the last loss."""
        loss = None
        for _ in range(steps if self.side is not None else 0):
            assert self.side is not None
            loss = self.side.step(self.done, *self.batches[self.done % len(self.batches)])
            self.done += 1
        return loss

    def losses(self, steps: int) -> list[float]:
        """Train some steps; return every loss, which some rank of a pipeline knows."""
        found = [float(loss) for _ in range(steps) if (loss := self.run(1)) is not None]
        return [known_loss(self.stage.all(loss)) for loss in found] if isinstance(self.side, PipeRunner) else found

    def block(self, steps: int) -> float:
        """Return the milliseconds of a step in a block, on the slowest rank."""
        if self.side is not None:
            self.side.rest()

        def work() -> None:
            self.run(steps)

        spent = self.stage.timed(work)
        return 1e3 * max(self.stage.all(spent if self.plays else 0.0)) / steps


def rank_main(order: dict[str, Any]) -> None:
    """Be one rank of one row; `order` is what `gpu_throughput.attempt` asks for."""
    from torch import _dynamo

    if hasattr(_dynamo.config, "recompile_limit"):
        _dynamo.config.recompile_limit = 64
    stage = Stage(order)
    smoke = stage.smoke
    pairs = ("options", "numerics")
    specs = [Spec(**each | {key: tuple(map(tuple, each[key])) for key in pairs}) for each in order["specs"]]
    stage.say("ready", units=stage.scene.units, torch=torch.__version__, device=stage.device_name)
    if order["what"] != "speed":
        measure_bytes(stage, specs, order["what"])
    else:
        if order["ceiling"] and not smoke:
            stage.say("ceiling", **ceilings(stage))
        measure_speed(stage, specs, order)
    stage.all(0.0)
    dist.destroy_process_group()


def measure_speed(stage: Stage, specs: list[Spec], order: dict[str, Any]) -> None:
    """Build all sides, then measure those that stand, in turns."""
    batches = batches_of(stage.scene)
    runners, losses = [], {}
    for spec in specs:
        runner, found = start(stage, spec, batches)
        if runner is not None:
            runners.append(runner)
            losses[spec.name] = found
    compare_losses(stage, specs, losses)
    for name, worst in distances({each.spec.name: each.side for each in runners}).items():
        stage.say("gradients", side=name, worst=worst, agree=worst <= NORMS_WITHIN)
    steps = {each.spec.name: steps_for(each.block(3), order["block_s"]) for each in runners}
    for repeat in range(order["repeats"]):
        for runner in runners if repeat % 2 == 0 else runners[::-1]:
            count = steps[runner.spec.name]
            stage.say("sample", side=runner.spec.name, step_ms=runner.block(count), steps=count)
    memory = 0 if stage.scene.smoke else torch.cuda.max_memory_allocated()
    stage.say("measured", peak_bytes=memory)
    for runner in runners if order["profile"] else ():
        profile_side(stage, runner)


def profile_side(stage: Stage, runner: Runner) -> None:
    """Say where some steps of a side spend their time, on the first GPU and on the last."""
    from gpu_kernels import account, kernels_of

    stage.all(0.0)
    try:
        found = account(kernels_of(lambda: runner.run(PROFILED_STEPS)), PROFILED_STEPS) if runner.plays else {}
    except Exception:  # told, but not the end: the others wait below for this rank's numbers, and speed counts without
        traceback.print_exc()
        found = {}
    last = [stage.all(found.get(key, 0.0))[-1] for key in ("computing", "communicating", "exposed", "idle")]
    if found:
        stage.say("profile", side=runner.spec.name, last_gpu=last, **found)


def start(stage: Stage, spec: Spec, batches: list[tuple[Tensor, Tensor]]) -> tuple[Runner | None, list[float]]:
    """Build one side and warm it up; say so, or why it failed on any rank."""
    began_s, runner, found, why = time.monotonic(), None, [], ""
    try:
        runner = Runner(spec, stage, batches)
        found = runner.losses(WARM_STEPS)
        stage.synchronize()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    if max(stage.all(float(bool(why)))):
        stage.say("failed", side=spec.name, why=why or "on another rank", memory="OutOfMemory" in why)
        del runner
        gc.collect()
        return None, []
    stage.say("built", side=spec.name, seconds=round(time.monotonic() - began_s, 1), losses=found)
    return runner, found


def compare_losses(stage: Stage, specs: list[Spec], losses: dict[str, list[float]]) -> None:
    """Say how far each side's losses are from the first side's that trains on as many GPUs."""
    for spec in specs:
        reference = next((each.name for each in specs if on_own(each) == on_own(spec) and each.name in losses), None)
        if spec.name not in losses or reference is None or not losses[reference]:
            continue
        pairs = zip(losses[spec.name], losses[reference], strict=True)
        worst = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        stage.say("losses", side=spec.name, against=reference, worst=worst, agree=worst <= LOSSES_WITHIN)


def on_own(spec: Spec) -> bool:
    """True for a side that averages with nobody."""
    return spec.alone or spec.apart


def steps_for(step_ms: float, block_s: float) -> int:
    """Return how many steps make a block."""
    return max(3, min(2000, round(block_s * 1e3 / max(step_ms, 1e-3))))


def measure_bytes(stage: Stage, specs: list[Spec], what: str) -> None:
    """Say each side's peak from before the wrap until after some steps, without what was there before.

    `states`: what it holds between two steps instead, beside the formula, and its losses.
    """
    batches, smoke = batches_of(stage.scene), stage.scene.smoke
    for spec in specs:
        gc.collect()
        if not smoke:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = 0 if smoke else torch.cuda.memory_allocated()
        try:
            runner = Runner(spec, stage, batches)
            losses = runner.losses(MEMORY_STEPS) if what == "states" else [runner.run(MEMORY_STEPS)]
            if what == "states":
                assert isinstance(runner.side, LoopSide)
                runner.side.optimizer.zero_grad()
            stage.synchronize()
        except Exception as error:
            traceback.print_exc()
            stage.say("failed", side=spec.name, why=str(error), memory="OutOfMemory" in str(error))
            return
        more = {}
        if what == "states":
            gc.collect()
            stage.say("built", side=spec.name, losses=losses)
            formula = elements_of(stage.scene) * STATE_BYTES[spec.precision] / stage.scene.ranks
            held, more = formula if smoke else torch.cuda.memory_allocated() - before, {"formula_bytes": formula}
        else:
            # What a graph has freed it uses again, though it counts as free: such a side has what it reserved.
            kind = "reserved" if dict(spec.options).get("cuda_graphs") else "allocated"
            held = 1 if smoke else getattr(torch.cuda, f"max_memory_{kind}")() - before
        stage.say("memory", side=spec.name, peak_bytes=max(stage.all(held)), before_bytes=before, **more)
        del runner


def elements_of(scene: Scene) -> int:
    """Return how many parameters the model has."""
    from muster.jobs.models.model_shape import resolve_shape
    from muster.jobs.spec.train_fields import ModelSettings

    classes = scene.shape["vocabulary"] if scene.is_gpt else 10
    return resolve_shape(ModelSettings(name=scene.model, **scene.shape), classes).parameter_count()


def ceilings(stage: Stage) -> dict[str, float]:
    """Return TFLOP/s of matrix products, and the milliseconds of attention by each of PyTorch's ways."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    found = {}
    for name, (rows, inner, columns) in {"square": (CEILING,) * 3, "gpt_small": (32768, 768, 3072)}.items():
        a = torch.randn(rows, inner, device=stage.scene.device, dtype=torch.bfloat16)
        b = torch.randn(inner, columns, device=stage.scene.device, dtype=torch.bfloat16)
        times = [stage.timed(lambda a=a, b=b: [a @ b for _ in range(20)] and None) for _ in range(4)]  # type: ignore[misc]
        found[f"matmul_{name}_tflops"] = 2 * rows * inner * columns * 20 / statistics.median(times[1:]) / 1e12
    qkv = [
        torch.randn(32, 12, 1024, 64, device=stage.scene.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]

    def attend() -> None:
        for _ in range(10):
            scaled_dot_product_attention(*qkv, is_causal=True).backward(qkv[0])

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found[f"attention_{backend.name.lower()}_ms"] = min(stage.timed(attend) for _ in range(4)) * 1e2
        except RuntimeError as error:
            print(f"{backend.name}: {error}", flush=True)
    default = min(stage.timed(attend) for _ in range(3)) * 1e2
    return {**found, "attention_default_ms": default}
