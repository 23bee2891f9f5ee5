"""The closed-form formulas that `muster predict` prints for an exchange or a job, with the numbers filled in."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from muster.launch.bench.state_sizes import count_text

if TYPE_CHECKING:
    from muster.collectives_bench.cost.load import RankLoad
    from muster.collectives_bench.cost.modes import Way
    from muster.collectives_bench.cost.profile import Profile
    from muster.jobs.spec.train import TrainSettings

MOST_RINGS: Final = 4  # number of rings shown below a table of exchanges


def ring(profile: "Profile", operation: str, nbytes: int, ranks: int, seconds: float | None) -> dict[str, Any] | None:
    """Return the steps and bytes of a ring, its predicted time and, if --link is given, its latency and bandwidth."""
    from muster.collectives_bench.cost.closed import ring_of

    found = ring_of(operation, nbytes, ranks)
    given = next((each for each in profile.constants if profile.is_given and each.beta_s > 0), None)
    link = {"latency_s": given and given.alpha_s, "bandwidth": given and 1 / given.beta_s}
    return found and {"operation": operation, **found, "seconds": seconds, **link}


def ring_text(record: dict[str, Any]) -> str:
    """Format a ring's steps, bytes and time, with the numbers filled in."""
    from muster.collectives_bench.sizes import time_text

    n, sent, seconds = record["ranks"], count_text(record["bytes_per_rank"]), record["seconds"]
    twice = record["steps"] > n - 1
    steps, share, factor = ("2 (N - 1)", "2 (N - 1) / N X", "2 x ") if twice else ("N - 1", "(N - 1) / N X", "")
    text = (
        f"{record['operation']} as a ring: {steps} = {record['steps']} steps; a rank sends {share} = "
        f"{factor}{n - 1} / {n} x {count_text(record['bytes'])} = {sent} bytes"
    )
    if not seconds:
        return text
    if record["bandwidth"] is None:
        return f"{text}; in {time_text(seconds)}: {count_text(record['bytes_per_rank'] / seconds)} bytes/s"
    return (
        f"{text}\n  t = steps x latency + bytes / bandwidth = {record['steps']} x {time_text(record['latency_s'])} + "
        f"{sent} / {count_text(record['bandwidth'])} = {time_text(seconds)}"
    )


def of_job(
    settings: "TrainSettings", load: "RankLoad", profile: "Profile", nodes: int, ways: "Sequence[Way]"
) -> dict[str, Any]:
    """Compute a job's ring all-reduce of the gradients, its messages between stages, and its best bucket size."""
    from muster.collectives_bench.cost.buckets import Lanes
    from muster.collectives_bench.cost.closed import best_bucket
    from muster.collectives_bench.cost.exposed import Times
    from muster.jobs.basics.errors import RefusedError

    gradients, seconds, bucket = load.sent_bytes(sum(load.gradient_sizes)), None, None
    times, host_s = Times(profile, load, nodes, "seconds"), Lanes.of(load.backend).host_s
    try:
        seconds = times.of("all_reduce", gradients)
        bucket = best_bucket(
            gradients,
            lambda nbytes: times.of("all_reduce", nbytes, back_to_back=True),
            load.recipe.gradient,
            host_s,
        )
    except RefusedError:  # the profile has no all-reduce; the rows of the modes give this reason
        pass
    return {
        "ring": ring(profile, "all_reduce", gradients, load.ranks, seconds),
        "pipeline": _boundaries(settings, load, ways),
        "bucket": bucket,
    }


def _boundaries(settings: "TrainSettings", load: "RankLoad", ways: "Sequence[Way]") -> dict[str, Any] | None:
    """Return the messages between pipeline stages. Without a pipeline, assume one with a stage per rank."""
    from muster.collectives_bench.cost.modes import cut, messages
    from muster.jobs.basics.errors import RefusedError
    from muster.launch.bench.own_split import own_split

    way = next((each for each in ways if each.schedule is not None and each.schedule.chunks == 1), None)
    if settings.is_pipeline:
        try:
            way, load = own_split(settings, load)
        except RefusedError:  # the job's `parallel` does not fit this number of layers or ranks
            return None
    if way is None or way.schedule is None:
        return None
    stages, names = (load.split.pipe, load.split.stages) if load.split else (load.ranks, ())
    slices = cut(load.model, way.schedule, stages, names)
    if slices is None or stages < 2:
        return None
    sizes = [each * load.itemsize for each in messages(slices, way.schedule)]  # bytes per sample
    record = {"mode": way.name, "stages": stages, "batch": load.batch, "boundaries": sizes}
    return record | dict.fromkeys(("forward_bytes", "backward_bytes"), load.batch * sum(sizes))


def job_text(record: dict[str, Any], simulated: float | None) -> list[str]:
    """Format the result of `of_job`. `simulated` is the best bucket size in bytes by simulation, if known."""
    lines = [f"closed forms: {ring_text(record['ring'])}"] if record["ring"] else []
    lines += [_pipeline_text(record["pipeline"])] if record["pipeline"] else []
    return lines + ([_bucket_text(record["bucket"], simulated)] if record["bucket"] else [])


def _pipeline_text(pipe: dict[str, Any]) -> str:
    sizes, p, batch = pipe["boundaries"], pipe["stages"], pipe["batch"]
    formula = f"B x sum of N_f = {batch} x ({' + '.join(map(count_text, sizes))})"
    if len(set(sizes)) == 1 and len(sizes) == p - 1:
        formula = f"(P - 1) B N_f = {p - 1} x {batch} x {count_text(sizes[0])}"
    return (
        f"{pipe['mode']} with P = {p} stages: a forward pass sends {formula} = "
        f"{count_text(pipe['forward_bytes'])} bytes,\n  over all boundaries; a backward pass sends the same amount"
    )


def _bucket_text(bucket: dict[str, Any], simulated: float | None) -> str:
    from muster.collectives_bench.sizes import size_text, time_text

    s, w, o = count_text(bucket["bytes"]), count_text(bucket["bandwidth"]), time_text(bucket["overhead_s"], 3)
    beside = "muster predict --buckets simulates it" if simulated is None else f"simulated: {size_text(simulated)}"
    return (
        f"best bucket: sqrt(s w o) = sqrt({s} B x {w} B/s x {o}) = {size_text(bucket['bucket_bytes'])} ({beside})\n"
        f"  n = {bucket['buckets']:.3g} buckets cost s / (w n) + n o = {time_text(bucket['cost_s'], 3)} if the "
        "backward pass hides all but the last"
    )
