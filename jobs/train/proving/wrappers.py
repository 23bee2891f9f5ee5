"""Probes of a data-parallel wrapper: broadcasts, averages, and the number, size and overlap of collectives."""

from contextlib import nullcontext
from math import ceil
from typing import Any, Final

import torch

from muster.jobs.train.proving import toys
from muster.jobs.train.proving.bench import Bench, copy_into, finish, gradients_alone, mean_of
from muster.jobs.train.proving.judging import fault, few, kib, same
from muster.jobs.train.proving.kinds import BUCKET

LIMIT_MB: Final = 0.02  # bucket size: two layers of the toy
STEPS: Final = 3
TIED: Final = "layers.0.weight"
SPARE: Final = ("spare.weight", "spare.bias")
SAMPLES: Final = 103  # size of a data set to divide; a prime, so not a multiple of usual numbers of ranks
REFUSALS: Final = (RuntimeError, ValueError, NotImplementedError)
Faults = dict[str, str]


def synchronizes(bench: Bench) -> None:
    """Check the broadcast, the averages and the collectives of a few steps."""
    module, reference = bench.place(toys.Toy(bench.world.rank)), bench.place(toys.Toy(0))
    bench.traffic.watch(module.named_parameters())
    wrapped = build(bench, module)
    judge_start(bench, module, reference)
    copy_into(module, reference)
    faults: Faults = {}
    for step in range(STEPS):
        own = gradients_alone(reference, bench.batches(step))
        with bench.own_code(step), bench.traffic.recording():
            one_pass(wrapped, [bench.batch(step)])
            finish(wrapped)
        faults |= faults_of(bench, module, own)
        module.zero_grad(set_to_none=True)
    judge_gradients(bench, faults, module)
    judge_traffic(bench, sum(size_of(each) for each in own[0].values()), len(own[0]), not faults)
    judge_dealing(bench, wrapped)


def build(bench: Bench, module: toys.Toy) -> Any:
    """Wrap a toy, with small buckets if the class has a parameter for their size."""
    options = {BUCKET: LIMIT_MB} if bench.user.takes_buckets and BUCKET not in bench.user.args else {}
    with bench.own_code(0, "construction, before step"):
        return bench.user.build(module, **options)


def one_pass(wrapped: Any, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run forward and backward of micro-batches, all but the last in `no_sync()` if the class has it.

    Without `no_sync()`, `finish` is called after every micro-batch but the last. The caller calls it after the last.
    """
    can_wait = hasattr(wrapped, "no_sync")
    for index, (inputs, targets) in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with wrapped.no_sync() if can_wait and not is_last else nullcontext():
            (toys.loss_of(wrapped(inputs), targets) / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
        if not can_wait and not is_last:
            finish(wrapped)


def faults_of(bench: Bench, module: torch.nn.Module, own: list[dict[str, torch.Tensor]]) -> Faults:
    """Return the errors in the gradients of a module, by parameter."""
    mean, named = mean_of(own), dict(module.named_parameters())
    found = {name: fault(named[name].grad, mean[name], [each[name] for each in own], bench.world.rank) for name in mean}
    return {name: what for name, what in found.items() if what}


def judge_start(bench: Bench, module: toys.Toy, reference: toys.Toy) -> None:
    """Check that all ranks have rank 0's values, although their modules were built with different values."""
    pairs = zip(module.named_parameters(), reference.parameters(), strict=True)
    wrong = [name for (name, each), wanted in pairs if not same(each, wanted)]
    trained = [name for name in wrong if name != "frozen"]
    end = "differs from rank 0's after construction"
    said = f"{few(trained)} {end}" if trained else ""
    bench.judge("parameters-broadcast", said, "equal to rank 0's on all ranks, which began with different values")
    own = zip(module.named_buffers(), reference.buffers(), strict=True)
    buffers = [name for (name, each), wanted in own if not same(each, wanted)]
    bench.judge("buffers-broadcast", f"{few(buffers)} {end}" if buffers else "", "equal to rank 0's on all ranks")
    if trained:
        bench.row("frozen", None, "parameters are not broadcast at all")
    else:
        bench.judge("frozen", f"frozen {end}" if wrong else "", "equal to rank 0's on all ranks, and without gradients")


def judge_gradients(bench: Bench, faults: Faults, module: toys.Toy) -> None:
    """Check that gradients are averaged, and that no parameter is omitted."""
    names = [name for name, each in module.named_parameters() if each.requires_grad and name != TIED]
    left = [name for name in names if faults.get(name) in ("own", "missing")]
    wrong = [name for name in names if name in faults and name not in left]
    said = f"{len(left)} of {len(names)} gradients are {error_text(faults[left[0]])}: {few(left)}" if left else ""
    bench.judge("every-parameter", said, f"{len(names)} gradients in each of {STEPS} steps")
    none = len(left) == len(names)
    if none:
        bench.row("mean", None, "nothing is synchronized")
    else:
        said = f"{few(wrong)}: {faults[wrong[0]]}" if wrong else ""
        bench.judge("mean", said, f"the mean over {bench.world.size} ranks, in every step")
    if TIED in faults and (wrong or none):
        bench.row("tied", None, "other gradients are wrong, too")
        return
    said = f"the gradient of a shared weight is {error_text(faults[TIED])}" if TIED in faults else ""
    if module.tied.weight is not module.layers[0].weight:
        said = "the two layers no longer share their weight"
    bench.judge("tied", said, "the gradient of a shared weight adds both uses and is averaged")


def judge_traffic(bench: Bench, gradient_bytes: int, gradients: int, synchronized: bool) -> None:
    """Check the number, sizes and overlap of the collectives of the last step."""
    starts, traffic = bench.traffic.starts(), bench.traffic
    sizes = [each.size for each in starts]
    if not starts:
        why = "not visible in Python: compiled code starts them" if synchronized else "no collective is started"
        for name in ("collectives", "buckets", "bucket-size", "overlap"):
            bench.row(name, None, why)
        return
    names = ", ".join(sorted({each.name for each in starts}))
    said = f"{len(starts)} per step ({names}), {kib(sum(sizes))} for {kib(gradient_bytes)} of gradients"
    bench.row("collectives", sum(sizes) <= 2.1 * gradient_bytes, said)
    if bench.user.takes_buckets:
        limit = float(bench.user.args.get(BUCKET, LIMIT_MB)) * 2**20
        most = 2 * ceil(gradient_bytes / limit) + 1
        said = f"{len(starts)} collectives for {gradients} gradients with {BUCKET}={limit / 2**20:g}"
        bench.row("buckets", len(starts) <= most < gradients or len(starts) == 1, f"{said}; at most {most} are needed")
        said = f"the largest has {kib(max(sizes))}, the limit is {kib(limit)}"
        bench.row("bucket-size", max(sizes) <= limit, said)
    else:
        bench.row("buckets", None, f"the class has no parameter {BUCKET}")
        bench.row("bucket-size", None, f"the class has no parameter {BUCKET}")
    early = traffic.overlapping()
    said = f"{early} of {len(starts)} collectives overlap with the computation of a later gradient"
    bench.row("overlap", early > 0, said)


def judge_dealing(bench: Bench, wrapped: Any) -> None:
    """Check the samples that a class with `sampler(dataset)` assigns to each rank."""
    if not hasattr(wrapped, "sampler"):
        bench.row("steps", None, "the class has no sampler(dataset)")
        bench.row("data", None, "the class has no sampler(dataset)")
        return
    with bench.own_code(0, "sampler, after step"):
        mine = [int(each) for each in wrapped.sampler(range(SAMPLES))]
    dealt = bench.everywhere(mine)
    counts = [len(each) for each in dealt]
    bench.row("steps", len(set(counts)) == 1, f"samples of each rank: {counts}")
    twice = sum(counts) - len({each for one in dealt for each in one})
    missing = SAMPLES - len({each for one in dealt for each in one if 0 <= each < SAMPLES})
    padding = bench.world.size - 1
    said = f"of {SAMPLES} samples {twice} are duplicated and {missing} missing; padding explains up to {padding}"
    bench.row("data", twice <= padding and missing <= padding, said)


def accumulates(bench: Bench) -> None:
    """Check the gradient of two micro-batches, and whether the class synchronizes in `no_sync()`."""
    module = bench.place(toys.Toy(0))
    wrapped, reference = build(bench, module), bench.place(toys.Toy(0))
    with bench.own_code(0), bench.traffic.recording():
        one_pass(wrapped, [bench.batch(0)])
        finish(wrapped)
    once = sum(each.size for each in bench.traffic.starts())
    if faults_of(bench, module, gradients_alone(reference, bench.batches(0))):
        bench.row("micro-batches", None, "a step of one micro-batch is already wrong")
        return
    module.zero_grad(set_to_none=True)
    micro_batches = [bench.batch(1), bench.batch(2)]
    own = [gradients_alone(reference, bench.batches(step)) for step in (1, 2)]
    halves = [{name: (first[name] + second[name]) / 2 for name in first} for first, second in zip(*own, strict=True)]
    with bench.own_code(1), bench.traffic.recording():
        one_pass(wrapped, micro_batches)
        finish(wrapped)
    faults, sent = faults_of(bench, module, halves), sum(each.size for each in bench.traffic.starts())
    how = "with no_sync()" if hasattr(wrapped, "no_sync") else "without no_sync(), synchronized twice"
    if faults:
        name, what = next(iter(faults.items()))
        bench.row("micro-batches", False, f"two micro-batches {how}: {len(faults)} wrong, {name}: {error_text(what)}")
    elif hasattr(wrapped, "no_sync") and sent > 1.5 * once:
        said = f"two micro-batches {how} send {kib(sent)}, one sends {kib(once)}: no_sync() does not stop communication"
        bench.row("micro-batches", False, said)
    else:
        bench.row("micro-batches", True, f"two micro-batches {how}: the gradient is the mean of both")


def unused(bench: Bench) -> None:
    """Check a step in which no rank uses a certain layer, and the steps before and after."""
    judge_unused(bench, "unused", (bench.world.size, 0, bench.world.size), "that no rank uses")


def unused_somewhere(bench: Bench) -> None:
    """Check a step in which only rank 0 uses a certain layer, after the steps of `unused`."""
    judge_unused(bench, "unused-somewhere", (bench.world.size, 0, 1, bench.world.size), "that only rank 0 uses")


def judge_unused(bench: Bench, name: str, users: tuple[int, ...], what: str) -> None:
    """Check steps in each of which the first `users` ranks use a certain layer."""
    module, reference = bench.place(toys.Toy(0)), bench.place(toys.Toy(0))
    wrapped, wrong = build(bench, module), ""
    for step, using in enumerate(users):
        module.uses_spare, own = bench.world.rank < using, []
        for rank, batch in enumerate(bench.batches(step)):
            reference.uses_spare = rank < using
            own += gradients_alone(reference, [batch])
        try:
            with bench.own_code(step):
                one_pass(wrapped, [bench.batch(step)])
                finish(wrapped)
        except REFUSALS as error:
            if step == 0:
                raise
            said = " ".join(str(error).split())[:120]
            bench.row(name, None, f"the class refuses parameters that are unused in a step: {said}")
            return
        faults = faults_of(bench, module, own)
        if not using:
            faults = {each: fault for each, fault in faults.items() if not (each in SPARE and fault == "missing")}
        if faults and step == 0:
            bench.row(name, None, "a step that uses every parameter is already wrong")
            return
        if faults and not wrong:
            first, fault = next(iter(faults.items()))
            wrong = (
                f"step {step}, with a layer that {using} of {bench.world.size} ranks use: {first}: {error_text(fault)}"
            )
        module.zero_grad(set_to_none=True)
    bench.row(name, not wrong, wrong or f"a layer {what} in a step disturbs neither that step nor the next")


def error_text(fault: str) -> str:
    """Return the text for an error in a gradient."""
    return "this rank's own" if fault == "own" else fault


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()
