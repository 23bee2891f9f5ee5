"""Probes of a sharded optimizer: each rank updates a part of the parameters, then all ranks receive all parts."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.jobs.train.proving import toys
from muster.jobs.train.proving.bench import Bench, gradients_alone, mean_of
from muster.jobs.train.proving.judging import few, half_way, kib, nbytes, same, share

STEPS: Final = 3
OPTIONS: Final = {"lr": 0.01, "weight_decay": 0.1}
LATER: Final = 4  # number of layers that are added later as a separate group

Recorded = list[torch.optim.Optimizer]


def recording(kind: type[torch.optim.Optimizer]) -> tuple[Callable[..., torch.optim.Optimizer], Recorded]:
    """Return a subclass of `kind` that records its instances, and the list of recorded instances."""
    made: Recorded = []

    class Recording(kind):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    Recording.__name__ = Recording.__qualname__ = kind.__name__
    return Recording, made


def state_bytes(optimizers: Sequence[Any]) -> int:
    """Return the bytes of the state of optimizers, each storage once, without scalars such as `step`."""
    tensors = [
        each
        for optimizer in optimizers
        for state in getattr(optimizer, "state", {}).values()
        for each in (state.values() if isinstance(state, dict) else ())
        if isinstance(each, Tensor) and each.dim() > 0
    ]
    return nbytes(tensors)


def steps(bench: Bench) -> None:
    """Check values, state, gradients and collectives over a few steps with one parameter group."""
    module, reference = (bench.place(toys.layers(0)) for _ in range(2))
    cls, made = recording(torch.optim.AdamW)
    plain = torch.optim.AdamW(reference.parameters(), **OPTIONS)  # type: ignore[arg-type]
    with bench.own_code(0, "construction, before step"):
        optimizer = bench.user.build(list(module.parameters()), cls, **OPTIONS)
    wrong: dict[str, list[int]] = {}
    for step in range(STEPS):
        give_gradients(bench, step, module, reference)
        plain.step()
        with bench.own_code(step), bench.traffic.recording():
            optimizer.step()
        wrong |= wrong_values(bench, module, reference)
        optimizer.zero_grad()
        if step == 0:
            left = [name for name, each in module.named_parameters() if each.grad is not None and bool(each.grad.any())]
            said = f"zero_grad() leaves gradients of {few(left)}" if left else "zero_grad() clears every gradient"
            bench.row("zero-grad", not left, said)
        module.zero_grad(set_to_none=True)
    judge_values(bench, wrong)
    judge_state(bench, state_bytes([optimizer, *made]), state_bytes([plain]))
    starts = bench.traffic.starts()
    names = ", ".join(sorted({each.name for each in starts}))
    said = f"{len(starts)} per step ({names or 'none seen'}), {kib(sum(each.size for each in starts))}"
    bench.row("collectives", True if starts else None, said)


def give_gradients(bench: Bench, step: int, module: nn.Module, reference: nn.Module) -> None:
    """Set the gradients of both modules to the mean over the ranks."""
    mean = mean_of(gradients_alone(reference, bench.batches(step)))
    for each in (module, reference):
        for name, parameter in each.named_parameters():
            parameter.grad = mean[name].clone()


def wrong_values(bench: Bench, module: nn.Module, reference: nn.Module) -> dict[str, list[int]]:
    """Return, by name, the ranks with wrong values of a parameter; reset all parameters to the reference's values."""
    wanted = dict(reference.named_parameters())
    mine = [name for name, each in module.named_parameters() if not same(each, wanted[name])]
    with torch.no_grad():
        for name, each in module.named_parameters():
            each.copy_(wanted[name])
    found: dict[str, list[int]] = {}
    for rank, names in enumerate(bench.everywhere(mine)):
        for name in names:
            found.setdefault(name, []).append(rank)
    return found


def judge_values(bench: Bench, wrong: dict[str, list[int]]) -> None:
    """Check that every parameter is updated by some rank, and that all ranks then have its new value."""
    nowhere = [name for name, ranks in wrong.items() if len(ranks) == bench.world.size]
    apart = {name: ranks for name, ranks in wrong.items() if name not in nowhere}
    good = "equal to those of torch.optim.AdamW"
    said = f"{few(nowhere)} differ from torch.optim.AdamW's on all ranks" if nowhere else good
    bench.row("steps-as-plain", not nowhere, f"{said}, in {STEPS} steps")
    if apart:
        name, ranks = next(iter(apart.items()))
        said = f"{len(apart)} parameters are correct only on some ranks; {name} is wrong on rank {ranks[0]}"
        bench.row("agree", False, said)
    elif nowhere:
        bench.row("agree", None, "some parameters are wrong on all ranks")
    else:
        bench.row("agree", True, "all ranks have all updated parameters after every step")


def judge_state(bench: Bench, mine: int, whole: int) -> None:
    """Check that this rank keeps about its share of the optimizer's state."""
    total = sum(bench.everywhere(mine))
    if total == 0:
        bench.row("state-sharded", None, "the instances of optimizer_cls have no state; let the class step them")
        return
    bench.row("state-sharded", mine <= half_way(bench.world.size) * whole, share(mine, whole, bench.world.size))


def groups(bench: Bench) -> None:
    """Check parameter groups with different learning rates, and a group that is added between steps."""
    module, reference = (bench.place(toys.layers(0)) for _ in range(2))
    plain = torch.optim.AdamW(parts_of(reference)[:2], **OPTIONS)  # type: ignore[arg-type]
    try:
        with bench.own_code(0, "construction with groups, before step"):
            optimizer = bench.user.build(parts_of(module)[:2], torch.optim.AdamW, **OPTIONS)
        wrong: dict[str, list[int]] = {}
        for step in range(STEPS):
            if step == 1:
                optimizer.add_param_group(parts_of(module)[2])
                plain.add_param_group(parts_of(reference)[2])
            give_gradients(bench, step, module, reference)
            plain.step()
            with bench.own_code(step):
                optimizer.step()
            wrong |= wrong_values(bench, module, reference)
            module.zero_grad(set_to_none=True)
    except NotImplementedError as error:
        bench.row("groups", None, f"the class refuses groups: {error}")
        return
    name, ranks = next(iter(wrong.items()), ("", []))
    said = f"{len(wrong)} parameters are wrong; {name} on ranks {ranks}"
    bench.row("groups", not wrong, said if wrong else "three groups, one of them added after a step")


def settings(bench: Bench) -> None:
    """Check that steps use the settings of groups that changed after the step before, as a schedule changes them."""
    module, reference = (bench.place(toys.layers(0)) for _ in range(2))
    plain = torch.optim.AdamW(reference.parameters(), **OPTIONS)  # type: ignore[arg-type]
    with bench.own_code(0, "construction, before step"):
        optimizer = bench.user.build(list(module.parameters()), torch.optim.AdamW, **OPTIONS)
    if not getattr(optimizer, "param_groups", None):
        bench.row("settings", None, "the class has no param_groups")
        return
    wrong: dict[str, list[int]] = {}
    for step in range(STEPS):
        for group in (*optimizer.param_groups, *plain.param_groups) if step else ():
            group.update(lr=OPTIONS["lr"] * (step + 1), weight_decay=OPTIONS["weight_decay"] / step)
        give_gradients(bench, step, module, reference)
        plain.step()
        with bench.own_code(step):
            optimizer.step()
        found = wrong_values(bench, module, reference)
        if found and step == 0:
            bench.row("settings", None, "a step with the first settings is already wrong")
            return
        wrong |= found
        module.zero_grad(set_to_none=True)
    said = f"a step ignores lr or weight_decay of param_groups if they changed: {few(list(wrong))}" if wrong else ""
    bench.judge("settings", said, "lr and weight_decay changed between steps, in param_groups")


def parts_of(module: nn.Sequential) -> list[dict[str, Any]]:
    """Return the parameters of a toy as three groups, of which the second has another learning rate."""
    children = list(module)
    cut = [children[:3], children[3:-LATER], children[-LATER:]]
    found: list[dict[str, Any]] = [{"params": [p for each in part for p in each.parameters()]} for part in cut]
    found[1]["lr"] = 0.003
    return found
