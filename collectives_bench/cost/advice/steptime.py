"""Predict the step of a plan, by parts, from measured layer times and a network profile. Pure.

    step = data + computation + bubble + communication + update

    computation     forward and backward passes, including what collectives beside them cost
    bubble          the time for which a pipeline's rank waits for other ranks
    communication   exchanges that no computation hides
    update          the optimizer's step

In a pipeline, computation and bubble are means over the ranks. `host` is the part of these in which a GPU waits for
its host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Final

from muster.collectives_bench.cost.advice.measured import SHARDED, SPLITS_BACKWARD, WHOLE, actions_of
from muster.collectives_bench.cost.advice.pipelines import PipelineTask, PipelineTimes, alone, shared, stage_ranks
from muster.collectives_bench.cost.advice.plans import SplitPlan
from muster.collectives_bench.cost.advice.site import GroupNetwork, JobSite, NoNetwork
from muster.collectives_bench.cost.buckets import Lanes
from muster.collectives_bench.cost.exposed import (
    BUCKETS,
    EXPOSED,
    NO_COMPUTE,
    Bound,
    Compute,
    Network,
    Times,
    slowing_s,
)
from muster.collectives_bench.cost.load import RankLoad, Split
from muster.collectives_bench.cost.memory import PeakMemory, memory_of
from muster.collectives_bench.cost.messages import between_layers
from muster.collectives_bench.cost.modes import PredictedStage, chunks_of, cut
from muster.collectives_bench.cost.slices import held_by
from muster.jobs.models.anatomy import Anatomy

ONE_WAY: Final = ("gpipe", "1f1b")  # schedules in which a micro-batch visits every stage once in each direction
HIDES_BACKWARD: Final = ("flat", "allreduce", "overlap", "bucketed", "ddp")
SURELY: Final = 0.8  # of an all-reduce of all gradients: the sum of its parts is not less
FULLY_SHARDED: Final = 3  # ZeRO's stage
UNIT_CALLS: Final = 3  # of a fully sharded unit: gathered for the forward and for the backward, then reduced
KINDS: Final = ("", WHOLE, SHARDED)  # of measured steps: pipelines, and modes without one
LONG: Final = 4 << 20  # bytes of a message whose rate is that of a link without pauses
PARTS: Final = ("data", "computation", "bubble", "communication", "update")


@dataclass(frozen=True)
class StepParts:
    """The predicted parts of a step, in seconds. `wire_bytes`: sent by the busiest rank."""

    data: float
    computation: float
    bubble: float
    communication: float
    update: float
    host: float = 0.0
    wire_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.data + self.computation + self.bubble + self.communication + self.update


def price(plan: SplitPlan, site: JobSite, bound: Bound = "seconds") -> StepParts:
    """Predict the parts of a plan's step.

    Raises:
        RefusedError: if the profile lacks an operation.
    """
    priced = _pipeline(plan, site, bound) if plan.schedule else _whole_model(plan, site, bound)
    return _beside_host(priced, plan, site)


def calibrated(site: JobSite) -> JobSite:
    """Return a site whose ranks share cores with the pace of the measured steps: measured time / predicted time.

    A rank that may continue does not get a core at once, so the cores are not always busy. The paces are the medians
    of the measured modes: without and with a pipeline.
    """
    if site.times.device != "cpu" or site.sharing < site.ranks:
        return site
    ratios = [_checked(site, kind) for kind in (WHOLE, "")]
    without, within = (1 / median(each) if each else 1.0 for each in ratios)
    return replace(site, paces=(without, within))


def kind_of(plan: SplitPlan) -> str:
    """Return the kind of measured steps that a plan is compared with: "" for pipelines, else `flat` or `zero1`."""
    return "" if plan.schedule else SHARDED if plan.zero else WHOLE


def measured_error(site: JobSite, kind: str) -> float:
    """Return the largest relative error among the predictions of the steps of a kind that this machine has measured.

    If none is of this kind, all count. It is the error without the paces, because the pace on other links is not known
    better than that.
    """
    ratios = _checked(site, kind) or [ratio for each in KINDS for ratio in _checked(site, each)]
    return max((abs(ratio - 1) for ratio in ratios), default=0.0)


def _checked(site: JobSite, kind: str) -> list[float]:
    """Return the ratios of predicted to measured time, for the steps of one kind that this machine has measured."""
    told, ratios = site.times, list[float]()
    network = NoNetwork() if told.device == "cpu" else site.network
    for step in told.steps:
        if ("" if step.is_pipeline else step.mode) != kind:
            continue
        load = replace(site.load, ranks=told.ranks, batch=step.microbatches * step.samples, split=None)
        here = JobSite(load, told, network, 1, told.ranks, records=site.records)
        plan = SplitPlan(data=told.ranks, averaging=step.mode)
        if step.is_pipeline:
            plan = SplitPlan(pipe=told.ranks, schedule=step.mode, microbatches=step.microbatches)
        ratios.append(price(plan, here).seconds / step.seconds)
    return ratios


def least_s(plan: SplitPlan, site: JobSite) -> float:
    """Return a step time that the plan cannot beat.

    It counts the work of an average stage, half of that of the stages before it until it can begin, the part of the
    averaging that the last backward cannot hide, and the exchanges of split layers.
    """
    samples = -(-site.load.batch // plan.data)
    micro = -(-samples // plan.microbatches)
    forward, backward = site.passes(plan, micro, 1 if plan.schedule else site.active)
    chunks = plan.way.schedule.chunks if plan.way.schedule else 1
    ahead_s = (plan.pipe - 1) / 2 * (forward + (backward if plan.schedule in ONE_WAY else 0.0)) / plan.pipe / chunks
    split_s = plan.microbatches * _split_layers(plan, site, micro, "seconds")[0] / plan.pipe
    work_s = plan.microbatches * plan.slices * (forward + backward) / plan.pipe + ahead_s + split_s
    averaged_s = 0.0
    if plan.data > 1 and plan.averaging in HIDES_BACKWARD:
        nbytes = sum(site.load.gradient_sizes) // (plan.pipe * plan.tensor)
        nodes = site.nodes_of(plan.data, plan.tensor)
        network = GroupNetwork(site.network, nodes, site.groups_on_link(plan.data, plan.tensor))
        took = network.predict(
            "all_reduce", nbytes, ranks=plan.data, nodes=nodes, backend=site.load.backend, back_to_back=True
        )
        averaged_s = max(SURELY * took.seconds - backward / plan.pipe, 0.0)
    return (work_s + averaged_s) * (1 - 1e-9)


def memory(plan: SplitPlan, site: JobSite) -> PeakMemory | None:
    """Return the memory of the rank that needs most; None if the model cannot be split this way."""
    return memory_of(plan.way, load_of(plan, site))


def load_of(plan: SplitPlan, site: JobSite) -> RankLoad:
    """Return the load of a plan."""
    load = site.load
    if plan.bucket_bytes is not None:
        load = replace(load, bucket_bytes=plan.bucket_bytes)
    if plan.way.family not in ("pipe", "tensor"):
        return load
    split = Split(plan.data, plan.pipe, plan.tensor, plan.zero, "sharded" if plan.zero else plan.averaging)
    return replace(load, split=split, microbatches=plan.microbatches)


# Without a pipeline ---------------------------------------------------------------------------------------------------


def _whole_model(plan: SplitPlan, site: JobSite, bound: Bound) -> StepParts:
    """Predict a step in which every rank has all layers, or a part of each."""
    load, samples = load_of(plan, site), -(-site.load.batch // plan.data)
    parts = load.accumulation
    forward, backward = site.passes(plan, samples / parts, site.active)
    update = _update_s(plan, site, 1.0)
    split_s, split_bytes = (parts * each for each in _split_layers(plan, site, samples / parts, bound))
    averaged = _averaging(plan, site, load.model, Compute(forward, backward, update), bound)
    return StepParts(
        data=site.times.data_s * samples / site.times.passes[0].samples,
        computation=parts * (forward + backward) + averaged.slowed_s + _engine_s(site, samples),
        bubble=0.0,
        communication=averaged.exposed_s - averaged.slowed_s + split_s,
        update=update,
        wire_bytes=averaged.wire_bytes + split_bytes,
    )


def _engine_s(site: JobSite, samples: float) -> float:
    """Return the seconds of a step's work besides passes, update and sums, on ranks that may share cores."""
    sums_s = site.times.messages.get("cpu_s_per_byte", 0.0) * sum(site.load.gradient_sizes)
    own_s = max(site.times.engine_s(WHOLE, samples) - sums_s, 0.0)
    return own_s * max(site.active / site.times.cores, 1.0)


@dataclass(frozen=True)
class _Averaged:
    """The cost of averaging gradients: exposed seconds, the part of them that is a slower backward, bytes sent."""

    exposed_s: float = 0.0
    slowed_s: float = 0.0
    wire_bytes: float = 0.0


def _averaging(plan: SplitPlan, site: JobSite, model: Anatomy, compute: Compute, bound: Bound) -> _Averaged:
    """Predict how gradients of one part of the model are averaged over the data-parallel ranks."""
    if plan.data == 1 or not model.trained:
        return _Averaged()
    load = replace(load_of(plan, site), model=model, ranks=plan.data, split=None)
    nodes = site.nodes_of(plan.data, plan.tensor)
    network = GroupNetwork(site.network, nodes, site.groups_on_link(plan.data, plan.tensor))
    times = Times(network, load, nodes, bound, _lanes(site, load, network, nodes))
    if plan.zero == 3:  # parameters are gathered for every micro-batch, and gradients sent in the last one
        passes = load.accumulation
        compute = replace(compute, forward_s=passes * compute.forward_s, backward_s=passes * compute.backward_s)
    exposed_s = EXPOSED[plan.averaging](load, compute, times)
    if not plan.schedule and site.active > site.times.cores:  # ranks that take turns do not end together
        exposed_s = max(exposed_s, 0.0)
    volume = load.sent_bytes(sum(load.gradient_sizes))
    return _Averaged(exposed_s, slowing_s(plan.averaging, load, compute, times), _sent(plan, volume))


def _lanes(site: JobSite, load: RankLoad, network: Network, nodes: int) -> Lanes:
    """Return how collectives and the backward slow each other, at the rate of an all-reduce of all gradients."""
    nbytes = sum(load.gradient_sizes)
    took = network.predict(
        "all_reduce", nbytes, ranks=load.ranks, nodes=nodes, backend=load.backend, back_to_back=True
    ).seconds
    return site.times.lanes(load.backend, site.active, nbytes / took if took else 0.0, site.cpu_s_per_byte)


def _sent(plan: SplitPlan, volume: float) -> float:
    """Return the bytes that the busiest rank sends to average `volume` bytes of gradients."""
    others = (plan.data - 1) / plan.data
    if plan.averaging == "gather_scatter":
        return (plan.data - 1) * volume
    return (3 if plan.zero == 3 else 2) * others * volume


def _split_layers(plan: SplitPlan, site: JobSite, samples: float, bound: Bound) -> tuple[float, float]:
    """Return the seconds and bytes of the exchanges between split layers, for a micro-batch."""
    if plan.tensor == 1:
        return 0.0, 0.0
    exchanges = between_layers(replace(site.load, sequence=False), samples)
    nodes = site.nodes_of(plan.tensor, 1)
    took = (
        site.network.predict(
            operation, nbytes, ranks=plan.tensor, nodes=nodes, backend=site.load.backend, back_to_back=True
        )
        for operation, nbytes in exchanges
    )
    seconds = sum(getattr(each, bound) for each in took)
    return seconds, 2 * (plan.tensor - 1) / plan.tensor * sum(nbytes for _, nbytes in exchanges)


def _update_s(plan: SplitPlan, site: JobSite, share: float) -> float:
    """Return the seconds of the optimizer's step on `share` of the parameters; ZeRO and tensor ranks split it."""
    return site.times.update_s(site.active) * share / plan.tensor / (plan.data if plan.zero else 1)


def _beside_host(parts: StepParts, plan: SplitPlan, site: JobSite) -> StepParts:
    """Replace the time of reading data by the time for which a GPU waits for its host.

    The host reads data and enqueues a step while the GPU still works on the step before. It needs as long to start a
    part of a layer as all of it, and `call_s` to start a collective or a message. It launches a recorded step at once,
    and a recorded pipeline action by action.
    """
    told = site.times
    if told.device == "cpu" or not sum(told.host):
        return parts
    chunks = plan.way.schedule.chunks if plan.way.schedule else 0
    passes, call_s = plan.microbatches * chunks, told.messages.get("call_s", 0.0)
    averaging_s = 0.0 if chunks == 0 and site.replays(plan) else _collectives(plan, site) / plan.pipe * call_s
    if not site.replays(plan):
        busy_s = sum(told.host) * plan.microbatches / plan.pipe + 2 * passes * call_s
    else:
        busy_s = told.host_s(passes * actions_of(plan.schedule), plan.pipe) if chunks else 0.0
    host = max(parts.data + busy_s + averaging_s - (parts.seconds - parts.data), 0.0)
    return replace(parts, data=0.0, computation=parts.computation + host, host=host)


def _collectives(plan: SplitPlan, site: JobSite) -> int:
    """Count the collectives that a rank without a pipeline starts in a step."""
    if plan.data == 1:
        return 0
    load = load_of(plan, site)
    if plan.zero == FULLY_SHARDED:
        return UNIT_CALLS * len(load.model.units())
    if plan.averaging in BUCKETS:
        return len(BUCKETS[plan.averaging](load, NO_COMPUTE))
    return 1 if plan.averaging == "flat" else len(load.gradient_sizes)


# With a pipeline ------------------------------------------------------------------------------------------------------


def _pipeline(plan: SplitPlan, site: JobSite, bound: Bound) -> StepParts:
    """Predict a step of pipelines, which may have split layers and run side by side."""
    schedule = plan.way.schedule
    assert schedule is not None
    stages = site.kept(("stages", plan.schedule, plan.pipe), lambda: cut(site.load.model, schedule, plan.pipe))
    assert stages is not None
    samples = -(-site.load.batch // plan.data)
    micro = -(-samples // plan.microbatches)
    task = _task(plan, site, micro, bound)
    found = _simulated(plan, site, task)
    busy_s = sum(found.busy_s) / plan.pipe
    largest = max(stage.elements for stage in stages) / site.load.model.elements
    fill_s = site.times.accumulate_s * largest / plan.tensor if site.replays(plan) else 0.0  # of gradients, with zeros
    update = _update_s(plan, site, largest) + fill_s + site.times.each_step_s  # ranks end one after another
    last = _tail(plan, site, task, stages, found, bound)
    tied_s, tied_bytes = _tied(plan, site, bound)
    messages = sum(task.message) / max(len(task.message), 1)
    sent = 2 * max(stage.sent for stage in stages) * samples * site.load.itemsize
    _, split_bytes = _split_layers(plan, site, samples, bound)
    # The ramp of an unloaded pipeline includes its messages; the rest of a rank's waiting is the bubble.
    waits = found.seconds - busy_s
    return StepParts(
        data=site.times.data_s * samples / site.times.passes[0].samples,
        computation=busy_s,
        bubble=max(waits - 2 * messages * (plan.pipe - 1), 0.0),
        communication=min(waits, 2 * messages * (plan.pipe - 1)) + last.exposed_s + tied_s,
        update=update,
        wire_bytes=sent + last.wire_bytes + tied_bytes + split_bytes / plan.pipe,
    )


def _simulated(plan: SplitPlan, site: JobSite, task: PipelineTask) -> PipelineTimes:
    if site.times.device != "cpu" or site.sharing < site.ranks:
        return alone(task)
    side_by_side = plan.data * plan.tensor
    factors = [site.times.stretch(count * side_by_side) for count in range(plan.pipe + 1)]
    late_s = site.times.late_s()
    return shared(
        task,
        lambda count: factors[count],
        lambda count: late_s if count * side_by_side >= site.times.cores else 0.0,
    )


def _task(plan: SplitPlan, site: JobSite, micro: int, bound: Bound) -> PipelineTask:
    """Return the schedule and the costs of its stages, for ranks that compute one at a time if they share a machine."""
    schedule = plan.way.schedule
    assert schedule is not None
    slices = plan.slices
    shares_machine = site.times.device == "cpu" and site.sharing >= site.ranks
    forward, backward = site.passes(plan, micro, 1 if shares_machine else site.active)
    key = plan.pipe, schedule.chunks, schedule.turns_back
    chunks = site.kept(("chunks", *key), lambda: _chunks(plan, site.load.model))
    shares = site.kept(("shares", *key), lambda: [_share(site, chunk) for chunk in chunks])
    split_s, _ = _split_layers(plan, site, micro / slices, bound)
    action_s = site.times.engine_s(plan.schedule, micro / slices)
    sent = [
        site.times.message_s(micro / slices * chunk.outputs[-1] * site.load.itemsize, site.cpu_s_per_byte)
        for chunk in chunks[:-1]
    ]
    ends = [(before + after) / 2 for before, after in pairwise([0.0, *sent, 0.0])]  # of the messages of an action
    extra = [split_s / 2 * blocks + action_s + own_s for (_, _, blocks), own_s in zip(shares, ends, strict=True)]
    backward += site.times.accumulate_s / plan.tensor if site.replays(plan) else 0.0
    message, ahead = _messages(plan, site, chunks, micro / slices, bound)
    return PipelineTask(
        plan.schedule,
        plan.pipe,
        plan.microbatches,
        tuple(forward * share + more for (share, _, _), more in zip(shares, extra, strict=True)),
        tuple(backward * share + more for (_, share, _), more in zip(shares, extra, strict=True)),
        message,
        slices,
        site.times.backward_halves if plan.schedule in SPLITS_BACKWARD else (0.5, 0.5),
        ahead,
    )


def _chunks(plan: SplitPlan, model: Anatomy) -> list[PredictedStage]:
    """Return the parts of the model between cuts, in order: one for each stage of the schedule."""
    schedule = plan.way.schedule
    assert schedule is not None
    return [PredictedStage(parts, (parts[-1].outputs,)) for parts in chunks_of(model, schedule, plan.pipe)]


def _share(site: JobSite, chunk: PredictedStage) -> tuple[float, float, float]:
    """Return a chunk's share of the forward, of the backward and of the blocks."""
    model, names = site.load.model, {part.layer for part in chunk.parts}
    blocks = sum(name.startswith("block") for name in names) / max(model.blocks, 1)
    if measured := site.times.shares(names):
        return (*measured, blocks)
    whole = sum(part.flops + part.backward_flops for part in model.parts) or 1
    share = chunk.flops / whole
    return share, share, blocks


def _messages(
    plan: SplitPlan, site: JobSite, chunks: Sequence[PredictedStage], samples: float, bound: Bound
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of a message over each cut, and by how much it takes longer without a pause before it."""
    ranks = stage_ranks(plan.schedule, plan.pipe, len(chunks) // plan.pipe)
    stride = plan.data * plan.tensor
    found = []
    for chunk, (here, there) in zip(chunks, pairwise(ranks), strict=False):
        if here == there:
            found.append((0.0, 0.0))
            continue
        apart = here * stride // site.per_node != there * stride // site.per_node
        groups = min(stride, site.per_node) if apart else 1
        nbytes = samples * chunk.outputs[-1] * site.load.itemsize * groups
        ask = partial(
            site.network.predict,
            "ping_pong",
            ranks=2,
            nodes=2 if apart else 1,
            backend=site.load.backend,
            back_to_back=False,
        )
        took_s, long_s = (float(getattr(ask(size), bound)) for size in (nbytes, LONG))
        found.append((took_s, max(long_s * nbytes / LONG - took_s, 0.0)))
    messages, ahead = zip(*found, strict=True) if found else ((), ())
    return messages, ahead


def _tail(
    plan: SplitPlan,
    site: JobSite,
    task: PipelineTask,
    stages: Sequence[PredictedStage],
    found: PipelineTimes,
    bound: Bound,
) -> _Averaged:
    """Predict the averaging between pipelines, which begins in each stage's last backward.

    Stages that end early hide it behind the others' work.
    """
    if plan.data == 1:
        return _Averaged()
    split = Split(plan.data, plan.pipe, plan.tensor, plan.zero, plan.averaging)
    after, sent = 0.0, 0.0
    largest = max(range(plan.pipe), key=lambda rank: stages[rank].elements)
    for rank in sorted({0, largest, plan.pipe - 1}):  # the last to end, the longest, and the first
        stage = stages[rank]
        key = "own", plan.schedule, plan.pipe, plan.tensor, rank
        own = site.kept(key, partial(lambda stage: held_by(site.load, stage, split).model, stage))
        last_s = task.backward[rank] * site.times.stretch(site.active if site.sharing >= site.ranks else 1)
        each = _averaging(plan, site, own, Compute(0.0, last_s, 0.0), bound)
        after = max(after, found.ends_s[rank] + each.exposed_s - found.seconds)
        sent = max(sent, each.wire_bytes)
    return _Averaged(after, 0.0, sent)


def _tied(plan: SplitPlan, site: JobSite, bound: Bound) -> tuple[float, float]:
    """Return the seconds and bytes in which first and last stage add their gradients of a tied embedding."""
    head = site.load.model.parts[-1]
    if not site.load.model.width or head.tensors:
        return 0.0, 0.0
    nbytes = site.load.model.tensors[0].elements * site.load.recipe.gradient // plan.tensor
    took = site.network.predict(
        "all_reduce",
        nbytes,
        ranks=2,
        nodes=min(site.nodes, 2),
        backend=site.load.backend,
        back_to_back=False,
    )
    return float(getattr(took, bound)), nbytes
