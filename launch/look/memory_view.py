"""The text output of `muster memory RUN`: each rank's measured memory by kind, beside the predicted one."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.words import counted
from muster.jobs.runfolder.memory_rows import KINDS
from muster.launch.common import screen
from muster.launch.look.memories import MemoryCopies, RankMemory

if TYPE_CHECKING:
    from muster.collectives_bench.cost.memory import PeakMemory

COLUMNS: Final = ("rank>", "what", "measured>", "formula>", "ratio>")
ON_CPU: Final = "growth of the rank's memory since before its model was built, without the pages of libraries"
ON_GPU: Final = "memory allocated by the CUDA allocator"
LEGEND: Final = """\
parameters to buffers: storages of tensors, each counted once; maximum over {steps}. 1 MB is 2^20 bytes
after a step, peak: {how}
not explained: measured peak minus predicted peak. The formula omits scratch memory of kernels, cached blocks of the
allocator, threads, and the copy of the state from which a checkpoint is written
while made: peak while the model and optimizer were built; every rank builds the whole model first"""
ON_HEAP: Final = """\
in use: peak of the bytes allocated on the heap, sampled when the last layer's and the largest gradient arrive. The
peak also includes freed blocks that the heap keeps between used ones, and scratch memory of kernels at other times"""
OF_GRAPHS: Final = """\
graphs: memory reserved for recorded CUDA graphs, which only their replays use; cuda_graph: false saves it"""


def records(memory: RankMemory, formula: "PeakMemory | None") -> list[dict[str, Any]]:
    """Return rows {"what", "measured", "formula", "ratio"} that compare a rank's memory with the formula, in bytes."""
    expected = _expected(formula)
    rows = [_record(kind, memory.held[kind], expected.get(kind)) for kind in KINDS]
    if memory.rest is not None:
        at_rest = expected.get("at rest")
        rows.append(_record("all of these", sum(memory.held.values()), at_rest))
        rows.append(_record("after a step", memory.rest, at_rest))
        if memory.used is not None:
            rows.append(_record("in use", memory.used, expected.get("total")))
        rows.append(_record("peak", memory.peak, expected.get("total")))
        if "total" in expected:
            rows.append(_record("not explained", round(memory.peak - expected["total"]), None))
        rows.append(_record("while made", memory.making, None))
    if memory.graphs is not None:
        rows.append(_record("graphs", memory.graphs, None))
    if memory.reserved is not None:
        rows.append(_record("reserved", memory.reserved, None))
    return rows


def render(
    run_id: str,
    attempt: int,
    shown: Sequence[tuple[RankMemory, "PeakMemory | None"]],
    ranks: int,
    why: str = "",
    copies: MemoryCopies | None = None,
) -> str:
    """Format the memory of the `shown` ranks, out of `ranks`. `why` is the reason for a missing formula."""
    from muster.collectives_bench.cost.memory import masters_alone_text

    first = shown[0][0]
    facts = first.facts
    lines = [f"{run_id}, attempt {attempt}: mode {facts['mode']}, {counted(ranks, 'rank')} on {facts['device']}"]
    if len(shown) < ranks:
        lines[0] += f"; showing {len(shown)}: the fullest, or those named by --rank"
    lines += ["", screen.table(COLUMNS, cells(shown)), ""]
    if first.steps:
        how = ON_GPU if facts["device"] == "cuda" else ON_CPU
        steps = "the first step" if first.steps == 1 else f"the first {first.steps} steps"
        lines.append(LEGEND.format(how=how, steps=steps))
        lines += [ON_HEAP] if any(each.used is not None for each, _ in shown) else []
        lines += [OF_GRAPHS] if any(each.graphs is not None for each, _ in shown) else []
    else:
        lines.append("no step is done yet; this is the memory before the first step")
    explained = (masters_alone_text(formula) for _, formula in shown if formula is not None)
    lines += list(dict.fromkeys(filter(None, explained)))
    if any(formula is None for _, formula in shown):
        reason = why or "the job file of this run cannot be read"
        lines.append(f"the formula's memory is unknown: {reason}")
    if copies is not None:
        lines.append(copies_text(copies))
    return "\n".join(lines)


def copies_text(copies: MemoryCopies) -> str:
    """Describe what checkpoints in memory cost a node."""
    from muster.collectives_bench.sizes import size_text

    held, sent = copies.held, copies.sent
    rate = f", {sent / copies.seconds / 1e6:.0f} MB/s" if sent and copies.seconds else ""
    return (
        f"copies of the state in a node's memory, besides that of its ranks: {size_text(held) if held else 0}, and "
        f"{size_text(2 * held) if held else 0} while the next copy is made; the copy of step {copies.step} took "
        f"{copies.seconds:.2f} s, in which a node sent {size_text(sent) if sent else 0}{rate}"
    )


def cells(shown: Sequence[tuple[RankMemory, "PeakMemory | None"]]) -> Iterator[list[object]]:
    from muster.collectives_bench.sizes import size_text

    def text(value: float | None) -> str | None:
        if value is None:
            return None
        return f"-{size_text(-value)}" if value < 0 else size_text(value) if value else "0"

    for memory, formula in shown:
        for row in records(memory, formula):
            ratio = None if row["ratio"] is None else f"{row['ratio']:.3f}"
            yield [memory.rank, row["what"], text(row["measured"]), text(row["formula"]), ratio]


def _expected(formula: "PeakMemory | None") -> dict[str, float]:
    if formula is None:
        return {}
    kinds: dict[str, float] = {kind: getattr(formula, kind) for kind in KINDS}
    every = {**kinds, "at rest": sum(kinds.values()), "total": formula.total}
    return {name: value for name, value in every.items() if not math.isnan(value)}  # activations may be unknown


def _record(what: str, measured: int, formula: float | None) -> dict[str, Any]:
    return {"what": what, "measured": measured, "formula": formula, "ratio": measured / formula if formula else None}
