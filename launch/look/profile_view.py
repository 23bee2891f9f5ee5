"""The text output of `muster profile`: a comparison of ranks, then details and files of the chosen ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster.jobs.basics.words import counted
from muster.jobs.trace.kinds import COMMUNICATION
from muster.jobs.trace.record import numbers, shortened, table_of
from muster.launch.common import screen
from muster.launch.look.profiles import PHASES, RankProfile

TOP: Final = 12
STEP_COLUMNS: Final = ("step>", "host ms>", "GPU ms>", "in flight>", "hidden>", "overlap>")
ALLOCATION_COLUMNS: Final = ("MB>", "in step>", "alive ms>", "operator", "module")
LARGEST: Final = 5
FILES: Final = {
    "trace.json.gz": "trace of the steps; open it at ui.perfetto.dev",
    "flame.svg": "flame graph of host time; open it in a browser",
    "flame-cuda.svg": "flame graph of GPU time",
    "flame.json": "the frames of flame.svg as data",
    "flame-cuda.json": "the frames of flame-cuda.svg as data",
    "operators.txt": "operators, kernels, kinds, modules and phases",
    "operators.csv": "the same as CSV",
    "cuda-memory.pickle": "snapshot of GPU memory; open it at pytorch.org/memory_viz",
}


def render(run_id: str, attempt: int, profiles: Sequence[RankProfile], chosen: Sequence[RankProfile]) -> str:
    """Format the profiles of an attempt, with details of the chosen ranks."""
    record = profiles[0].record
    steps = numbers([step["step"] for step in record["steps"]])
    ranks = counted(int(record["world_size"]), "rank")
    lines = [
        f"{run_id}, attempt {attempt}: {steps} of {record['steps_of_job']}, mode {record['mode']}, "
        f"{ranks} on {record['device']}",
        "",
        comparison(profiles),
        "",
        "own: step time without exposed communication; the slowest rank comes first.",
        "overlap: time of communication while the rank computes / time of communication (in flight).",
    ]
    for profile in chosen:
        lines += ["", *details(profile)]
    return "\n".join(lines)


def comparison(profiles: Sequence[RankProfile]) -> str:
    """Format a table that compares the ranks, in milliseconds per step."""
    phases = [phase for phase in PHASES if any(phase in each.breakdown for each in profiles)]
    columns = ["rank>", "step ms>", "own>", *(f"{phase}>" for phase in phases), "in flight>", "overlap>", "matmul>"]
    columns += ["peak memory>"]
    return screen.table(columns, (_row(each, phases) for each in profiles))


def details(profile: RankProfile) -> list[str]:
    """Format the details of one rank: its steps, operators or kernels, modules, memory and files."""
    record = profile.record
    rows, what = (record["kernels"], "kernels") if record["kernels"] else (record["operators"], "operators")
    rows = sorted(rows, key=lambda row: (-row["cuda_self_us"], -row["cpu_self_us"]))
    device = record.get("device_phases") or {}
    busy = ", ".join(f"{phase} {seconds * 1e3 / max(1, len(record['steps'])):.1f}" for phase, seconds in device.items())
    return [
        f"rank {profile.rank} on {record['host']}, step by step",
        screen.table(STEP_COLUMNS, map(_step, record["steps"])),
        "",
        f"computing time of its {'kernels' if record['kernels'] else 'threads'} by kind: {kinds(record['kinds'])}",
        *([f"busy milliseconds of the GPU per step: {busy}"] if busy else []),
        "",
        f"{what} with the most self time, summed over all recorded steps",
        table_of(rows[:TOP]),
        *modules(record),
        *memory(record),
        *([f"left out, because the record is damaged: {', '.join(profile.left_out)}"] if profile.left_out else []),
        "",
        f"{profile.folder}/",
        *(f"  {name:19} {FILES[name]}" for name in FILES if name in record.get("files", ())),
    ]


def modules(record: Mapping[str, Any]) -> list[str]:
    """Format the time by kind of module, or why it is unknown; return [] for profiles of older runs."""
    if "modules_note" in record:
        return ["", record["modules_note"]]
    seconds, steps = record.get("modules", {}), max(1, len(record["steps"]))
    total = sum(seconds.values()) or 1.0
    rows = [[kind, _ms(each / steps), f"{each / total:.1%}"] for kind, each in seconds.items()]
    return [
        "",
        "forward and backward by kind of module",
        screen.table(("module", "ms per step>", "share>"), rows),
    ] * bool(rows)


def memory(record: Mapping[str, Any]) -> list[str]:
    """Format the time of the tensors' memory peak, and the largest allocations at that time."""
    points = record.get("memory_over_time")
    if not points:
        return []
    at_s, peak = max(points, key=lambda point: point[1])
    rows = [
        [
            f"{each['bytes'] / 2**20:.1f}",
            each["step"],
            _ms(each["alive_s"]),
            shortened(each["operator"]),
            each["module"],
        ]
        for each in record.get("allocations", ())[:LARGEST]
    ]
    title = f"peak of tensors: {peak / 2**20:.1f} MB, {_ms(at_s)} ms after the first recorded step began; the largest:"
    return ["", title, screen.table(ALLOCATION_COLUMNS, rows)]


def kinds(seconds: Mapping[str, float]) -> str:
    """Format the shares of computing time by kind. Communication is left out, because it has its own columns."""
    computed = {kind: each for kind, each in seconds.items() if kind != COMMUNICATION}
    total = sum(computed.values()) or 1.0
    return ", ".join(f"{kind} {each / total:.0%}" for kind, each in computed.items() if each / total >= 0.005) or "-"


def _row(profile: RankProfile, phases: Sequence[str]) -> list[object]:
    record = profile.record
    steps = record["steps"]
    in_flight_s = sum(step["communication_s"] for step in steps) / max(1, len(steps))
    memory = record.get("memory", {})
    peak = memory.get("cuda_peak_bytes") or memory.get("host_peak_bytes")
    return [
        profile.rank,
        _ms(profile.step_s),
        _ms(profile.own_s),
        *(_ms(profile.breakdown.get(phase, 0.0)) for phase in phases),
        _ms(in_flight_s),
        _ratio(record["overlap"]),
        _percent(record["matmul_share"]),
        None if peak is None else f"{peak / 2**20:.0f} MB",
    ]


def _step(step: dict[str, Any]) -> list[object]:
    device_s = step.get("device_s")
    times = [_ms(step["seconds"]), None if device_s is None else _ms(device_s)]
    return [step["step"], *times, _ms(step["communication_s"]), _ms(step["hidden_s"]), _ratio(step["overlap"])]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"
