"""Timings of models that were never measured: records as a rank writes them."""

from pathlib import Path
from typing import Any

from muster.jobs.basics.files import append_lines
from muster.jobs.measuring.recorded import End
from muster.jobs.spec.strict import Strict
from muster.jobs.timing.records import Header, Machine, Peak, Timed, TimingSummary
from muster.jobs.timing.settings import TimingSettings

MACHINE = Machine(host="n1", cpu="EPYC", cores=16, threads=16, memory_bytes=64 << 30)
GPU = MACHINE.model_copy(update={"gpu": "NVIDIA H200"})


def settings(**values: Any) -> TimingSettings:
    return TimingSettings.model_validate({"model": ["gpt-nano", "vgg11"], "passes": ["forward", "step"], **values})


def header(asked: TimingSettings, *, device: str = "cpu") -> Header:
    machine = GPU if device == "cuda" else MACHINE
    fields = {"name": "demo", "device": device, "machine": machine, "torch": "2.13.0", "settings": asked, "time": 1.0}
    return Header.model_validate(fields)


def peak(precision: str = "fp32", flops_per_s: float = 1.5e12) -> Peak:
    return Peak.model_validate({"precision": precision, "side": 2048, "flops_per_s": flops_per_s})


def timed(model: str = "gpt-nano", pass_name: str = "forward", **changes: Any) -> Timed:
    """A row of 100, 11, 10 and 12 ms, the first of them to warm up."""
    values: dict[str, Any] = {
        "model": model,
        "pass_name": pass_name,
        "precision": "fp32",
        "state": "ok",
        "parameters": 746_816,
        "batch": 16,
        "context": None if model.startswith("vgg") else 128,
        "build_s": 0.2,
        "warm_up_s": [0.1],
        "steps_s": [0.011, 0.010, 0.012],
        "summary": TimingSummary(n=3, mean_s=0.011, std_s=0.001, min_s=0.010),
        "rate": 186_182.0,
        "flops": 3_095_396_352,
        "flops_per_s": 2.814e11,
        "matmul_share": 0.1876,
        "peak_bytes": 190 << 20,
        "time": 2.0,
    }
    found = {**values, **changes}
    steps = len(found["steps_s"])
    if steps:  # the last of them in a launch of its own
        counts = [steps - 1, 1] if steps > 1 else [1]
        launches = [{"warm_up": 0, "steps": each, "time": float(at)} for at, each in enumerate(counts, 1)]
        found = {"launches": launches, **found}
    return Timed.model_validate(found)


def without_times(state: str, reason: str, **changes: Any) -> Timed:
    missing = {"warm_up_s": [], "steps_s": [], "summary": None, "rate": None, "flops_per_s": None}
    return timed(state=state, reason=reason, **{**missing, "matmul_share": None, "peak_bytes": None, **changes})


def end() -> End:
    return End(seconds=3.0, time=5.0)


def write_lines(path: Path, *records: Strict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    append_lines(path, [record.model_dump(mode="json") for record in records])
    return path
