"""Chrome traces from drawings: one character is ten microseconds, a lane a line."""

from typing import Any

from muster.jobs.trace.events import MARK

TICK_US = 10.0
PROCESS = 4242
MAIN = 4242
PHASES = {"d": "data", "f": "forward", "b": "backward", "c": "communication", "o": "optimizer"}


def spans(drawing: str, letter: str = "#") -> list[tuple[float, float]]:
    """Read the stretches of a letter: `..##.#` is [(20.0, 40.0), (50.0, 60.0)]."""
    found: list[tuple[float, float]] = []
    for at, each in enumerate(drawing):
        if each != letter:
            continue
        if found and found[-1][1] == at * TICK_US:
            found[-1] = (found[-1][0], (at + 1) * TICK_US)
        else:
            found.append((at * TICK_US, (at + 1) * TICK_US))
    return found


def event(
    category: str, name: str, start_us: float, end_us: float, thread: object = MAIN, **arguments: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": PROCESS,
        "tid": thread,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": arguments,
    }


def lane(category: str, name: str, drawing: str, thread: object = MAIN) -> list[dict[str, Any]]:
    """One event a stretch of `#`."""
    return [event(category, name, start, end, thread) for start, end in spans(drawing)]


def steps(drawing: str, first: int = 1) -> list[dict[str, Any]]:
    """Marks of steps: `ffbbco ffbb` are two steps, each from its first letter to its last."""
    marks, number, before = [], first, " "
    for at, each in enumerate(drawing + " "):
        if each != before and before != " ":
            marks.append((at, PHASES[before]))
        if before == " " and each != " ":
            marks.append((at, f"start {number}"))
        if each == " " and before != " ":
            marks.append((at, "stop"))
            number += 1
        before = each
    return [event("user_annotation", f"{MARK}{text}", at * TICK_US, at * TICK_US) for at, text in marks]


def link(source: float, target: float, number: int = 1, thread: object = MAIN) -> list[dict[str, Any]]:
    """The profiler's link from an operator of a forward to its part of the backward, by their beginnings in ticks."""
    ends = {"s": (source, MAIN), "f": (target, thread)}
    common = {"cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": PROCESS}
    return [{**common, "ph": ph, "tid": lane, "ts": at * TICK_US} for ph, (at, lane) in ends.items()]


def memory(*changes: tuple[float, int, int], device: int = 0, before: int = 0) -> list[dict[str, Any]]:
    """Changes of memory: tick, address, bytes; each with the allocator's total, which begins with `before`."""
    made, total = [], before
    for at, address, size in changes:
        total += size
        of = {"Addr": address, "Bytes": size, "Device Type": device, "Total Allocated": total}
        common = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": PROCESS, "tid": MAIN}
        made.append({**common, "ts": at * TICK_US, "args": of})
    return made


def kernels(name: str, drawing: str, launches: str, *, stream: int, first: int) -> list[dict[str, Any]]:
    """Kernels on a stream, and where on the main thread each was launched (`x`), in the same order."""
    made = []
    calls = [at * TICK_US for at, each in enumerate(launches) if each == "x"]
    for number, ((start, end), call) in enumerate(zip(spans(drawing), calls, strict=True), first):
        made.append(event("cuda_runtime", "cudaLaunchKernel", call, call + 1.0, correlation=number))
        kernel = event("kernel", name, start, end, stream, stream=stream, correlation=number)
        made.append({**kernel, "pid": 0})
    return made
