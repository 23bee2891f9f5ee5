"""Probes of a module with sharded parameters: the memory that each rank keeps, and the gradients."""

import gc
from typing import Any, Final

import torch
from torch import Tensor

from muster.jobs.train.proving import toys
from muster.jobs.train.proving.bench import Bench, finish, gradients_alone, mean_of
from muster.jobs.train.proving.judging import Tensors, fault, few, half_way, kib, nbytes, share
from muster.jobs.train.proving.kinds import FULL
from muster.jobs.train.proving.optimizers import recording, state_bytes
from muster.jobs.train.proving.wrappers import error_text, one_pass

LR: Final = 0.1


def keeps(bench: Bench) -> None:
    """Check the share of parameters, gradients and optimizer state that a rank keeps, and the gradients of one step."""
    reference = bench.place(toys.layers(0))
    own = gradients_alone(reference, bench.batches(0))
    whole = sum(each.numel() * each.element_size() for each in reference.parameters())
    batch, before = bench.batch(0), nbytes(tensors())
    module = bench.place(toys.layers(0))
    with bench.own_code(0, "construction, before step"):
        sharded = bench.user.build(module)
    del module
    judge_share(bench, "parameters-sharded", nbytes(tensors()) - before, whole)
    with bench.own_code(0), bench.traffic.recording():
        one_pass(sharded, [batch])
        finish(sharded)
    judge_share(bench, "gradients-sharded", nbytes(gradients()), whole)
    starts = bench.traffic.starts()
    said = f"{len(starts)} per step ({', '.join(sorted({each.name for each in starts})) or 'none seen'})"
    largest = max((each.size for each in starts), default=0)
    bench.row("collectives", True if starts else None, f"{said}; this rank sends at most {kib(largest)} in each")
    start = {name: each.detach().clone() for name, each in reference.named_parameters()}
    descended = step_and_read(bench, sharded)
    if descended is not None:
        judge_gradients(bench, {name: (start[name] - each) / LR for name, each in descended.items()}, own)
    judge_state(bench, sharded, batch, whole)


def tensors() -> list[Tensor]:
    """Return all live tensors of this process that Python's garbage collector tracks."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def gradients() -> list[Tensor]:
    """Return the gradients of all live parameters."""
    return [each.grad for each in tensors() if each.is_leaf and each.grad is not None]


def judge_share(bench: Bench, name: str, mine: int, whole: int) -> None:
    """Check that this rank keeps about 1 / world size of the bytes."""
    mine = max(mine, 0)
    bench.row(name, mine <= half_way(bench.world.size) * whole, share(mine, whole, bench.world.size))


def step_and_read(bench: Bench, sharded: Any) -> dict[str, Tensor] | None:
    """Update the shards by plain gradient descent; return the whole parameters, checked by `whole_state`."""
    torch.optim.SGD(list(sharded.parameters()), lr=LR).step()
    return whole_state(bench, sharded, dict(toys.layers(0).named_parameters()))


def whole_state(bench: Bench, sharded: Any, wanted: Tensors) -> dict[str, Tensor] | None:
    """Check and return `full_state_dict()`; return None if names or shapes differ from the module's."""
    with bench.own_code(0, f"{FULL}(), after step"):
        found = {name: each.detach() for name, each in getattr(sharded, FULL)().items()}
    wrong = [name for name, each in wanted.items() if name not in found or found[name].shape != each.shape]
    said = f"{FULL}() lacks {few(wrong)} in the right shape" if wrong else f"{len(wanted)} parameters, whole"
    bench.row("whole-state", not wrong, said)
    return None if wrong else {name: found[name].clone() for name in wanted}


def judge_gradients(bench: Bench, found: Tensors, own: list[dict[str, Tensor]]) -> None:
    """Check gradients that were derived from a step of plain gradient descent."""
    mean = mean_of(own)
    wrong = {
        name: what
        for name in mean
        if (what := fault(found[name], mean[name], [each[name] for each in own], bench.world.rank))
    }
    name, what = next(iter(wrong.items()), ("", ""))
    said = f"{len(wrong)} of {len(mean)} wrong; {name}: {error_text(what)}" if wrong else ""
    bench.judge("mean", said, f"the mean over {bench.world.size} ranks, of {len(mean)} parameters")


def judge_state(bench: Bench, sharded: Any, batch: tuple[Tensor, Tensor], whole: int) -> None:
    """Check the bytes of state that an optimizer over the shards keeps."""
    cls, made = recording(torch.optim.AdamW)
    optimizer = cls(sharded.parameters())
    optimizer.zero_grad()
    with bench.own_code(1):
        one_pass(sharded, [batch])
        finish(sharded)
        optimizer.step()
    judge_share(bench, "state-sharded", state_bytes(made), 2 * whole)


def accumulates(bench: Bench) -> None:
    """Check the accumulated gradients of two micro-batches."""
    reference = bench.place(toys.layers(0))
    start = {name: each.detach().clone() for name, each in reference.named_parameters()}
    with bench.own_code(0, "construction, before step"):
        sharded = bench.user.build(bench.place(toys.layers(0)))
    own = [gradients_alone(reference, bench.batches(step)) for step in (1, 2)]
    halves = [{name: (first[name] + second[name]) / 2 for name in first} for first, second in zip(*own, strict=True)]
    with bench.own_code(1):
        one_pass(sharded, [bench.batch(1), bench.batch(2)])
        finish(sharded)
    descended = step_and_read(bench, sharded)
    if descended is None:
        return
    bench.rows.clear()
    judge_gradients(bench, {name: (start[name] - each) / LR for name, each in descended.items()}, halves)
    bench.rows[-1]["name"] = "micro-batches"
