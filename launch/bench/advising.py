"""`muster advise JOB.yaml`: all ways to split a job, with predicted steps, and the best one. Returns plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import MusterError, RefusedError, UsageError
from muster.launch.bench import counting, layer_times, loads
from muster.launch.bench.source import parse_rate, parse_time, source_of
from muster.launch.bench.wanted import Wanted

if TYPE_CHECKING:
    from muster.collectives_bench.cost.advice.measured import LayerTimes
    from muster.collectives_bench.cost.advice.plans import SplitLimits, SplitPlan
    from muster.collectives_bench.cost.advice.search import Advised, Check
    from muster.collectives_bench.cost.advice.site import JobSite
    from muster.collectives_bench.cost.load import RankLoad
    from muster.collectives_bench.cost.profile import Profile
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.train import TrainSettings

WHAT_IF: Final = ("nodes", "ranks_per_node", "link", "latency", "batch", "memory")
BOX: Final = "box:"
FEW: Final = 4  # of a rank's samples, in the smallest measured pass


@dataclass(frozen=True)
class AdviceWanted(Wanted):
    """The request of `muster advise`: that of `muster predict`, and the options below."""

    hosts: str | None = None
    what_if: str | None = None
    options: str | None = None
    times: str | None = None
    keep_times: str | None = None

    def imagined(self) -> dict[str, str]:
        """Return the settings in `--what-if` by name.

        Raises:
            UsageError: if a setting is unknown, or has no value.
        """
        found = {}
        for word in (self.what_if or "").split(",") if self.what_if else ():
            key, equals, value = word.strip().partition("=")
            if key not in WHAT_IF or not equals or not value:
                raise UsageError(
                    f"--what-if {word}: expected KEY=VALUE with a key of {', '.join(WHAT_IF)}; "
                    "separate several by commas"
                )
            found[key] = value
        return found

    def wanted_options(self) -> tuple[str, ...]:
        """Return the names in `--options`.

        Raises:
            UsageError: if a name is unknown.
        """
        names = tuple(each.strip() for each in self.options.split(",")) if self.options else ()
        for name in names:
            if name not in layer_times.VARIANTS:
                raise UsageError(f"--options {name}: unknown; choose from {', '.join(layer_times.VARIANTS)}")
        return names


def advise(asked: AdviceWanted) -> dict[str, Any]:
    """Return the advice as plain values, in seconds and bytes.

    Raises:
        UsageError, JobFileError: if options or files are wrong.
        RefusedError: if the job does not train, or its model cannot be timed.
    """
    from muster.collectives_bench.cost.advice import search

    imagined, options = asked.imagined(), asked.wanted_options()
    job = _job(asked, imagined)
    settings = _settings(job)
    site, limits = _site(asked, imagined, job)
    limit = loads.memory_limit(imagined.get("memory") or asked.memory)
    check = checks(settings, site.ranks)
    began = perf_counter()
    found = search.advise(site, limits, check=check, memory_limit=limit)
    best, curve = (None, []) if found.best is None else search.best_bucket(found.best, site)
    tried = [] if best is None else _options(best, site, options, check, limit)
    then = [] if best is None else search.changes(site, limits, best.plan, check, limit)
    return {
        "muster_advice": 1,
        "job": job.name,
        "model": site.load.model.name,
        "parameters": site.load.model.elements,
        "ranks": site.ranks,
        "nodes": site.nodes,
        "batch": site.load.batch,
        "profile": asked.profile or asked.link or imagined.get("link"),
        "device": site.times.gpu or site.times.device,
        "memory_limit": limit,
        "considered": found.considered,
        "searched_s": perf_counter() - began,
        "best": best and _row(best),
        "runner_up": found.runner_up and _row(found.runner_up),
        "margin": found.margin,
        "clear": found.is_clear,
        "rows": [_row(row) for row in found.rows],
        "buckets": curve,
        "options": tried,
        "changes": then,
    }


def checks(settings: "TrainSettings", ranks: int) -> "Check":
    """Return a function that says why a job's other settings do not allow a plan; "" if they do."""
    from pydantic import ValidationError

    from muster.collectives_bench.cost.advice.plans import changed
    from muster.jobs.spec.train import TrainSettings

    given = settings.model_dump(exclude_unset=True)

    def check(plan: "SplitPlan") -> str:
        try:
            TrainSettings.model_validate(changed(given, plan.changes())).check(ranks)
        except ValidationError as error:
            return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        except MusterError as error:
            return str(error)
        return ""

    return check


def _job(asked: AdviceWanted, imagined: Mapping[str, str]) -> "Job":
    given = list(asked.overrides)
    given += [f"{key}={imagined[key]}" for key in ("nodes", "ranks_per_node") if key in imagined]
    given += [f"train.batch_size={imagined['batch']}"] if "batch" in imagined else []
    if asked.ranks_per_node is not None:
        given.append(f"ranks_per_node={asked.ranks_per_node}")
    job = loads.train_job(asked.job, given)
    loads.ranks_of(job, asked.job, "-n M")
    return job


def _settings(job: "Job") -> "TrainSettings":
    from muster.jobs.spec.train import TrainSettings

    assert isinstance(job.settings, TrainSettings)
    return job.settings


def _site(asked: AdviceWanted, imagined: Mapping[str, str], job: "Job") -> "tuple[JobSite, SplitLimits]":
    """Measure or read what the search needs."""
    from muster.collectives_bench.cost.advice.site import JobSite, KnownNetwork
    from muster.collectives_bench.cost.advice.steptime import calibrated
    from muster.jobs.spec.recorded import records

    ranks = loads.ranks_of(job, asked.job, "-n M")
    network = _network(asked, imagined)
    own = counting.own_code(job, _settings(job))
    per_node = ranks // job.nodes
    is_elsewhere = bool(imagined) or (asked.hosts is not None and not asked.hosts.startswith(BOX))
    sharing = per_node if is_elsewhere else ranks
    times = _times(asked, job, sharing)
    backend = asked.backend or ("nccl" if times.device == "cuda" else "gloo")
    if network.backends and backend not in network.backends:
        backend = network.backends[0]
    load = loads.load_of(job, ranks=ranks, backend=backend, microbatches=asked.microbatches, own=own)
    recording = records(_settings(job).model_copy(update={"mode": "bucketed", "parallel": None}), times.device)
    site = JobSite(
        load,
        times,
        KnownNetwork(network),
        job.nodes,
        sharing,
        cpu_s_per_byte=network.cpu_s_per_byte,
        records=recording,
    )
    return calibrated(site), _limits(load, _settings(job), None if own.model is None else own.model.no_layers)


def _network(asked: AdviceWanted, imagined: Mapping[str, str]) -> "Profile":
    from muster.collectives_bench.cost import profile

    if "link" in imagined:
        return profile.link(
            parse_rate(imagined["link"]), parse_time(imagined.get("latency", "0")), name=f"link of {imagined['link']}"
        )
    if "latency" in imagined:
        raise UsageError(f"--what-if latency={imagined['latency']}: belongs to a link; add link=RATE")
    return source_of(asked)


def _times(asked: AdviceWanted, job: "Job", sharing: int) -> "LayerTimes":
    from muster.collectives_bench.cost.advice.measured import FORMAT
    from muster.jobs.basics.files import write_text

    if asked.times is not None:
        found = FORMAT.read(Path(asked.times))
        if found.model != _settings(job).model.title:
            raise RefusedError(
                f"--times {asked.times}: has times of {found.model}, but the job trains "
                f"{_settings(job).model.title}; measure again without --times"
            )
        return found
    batch, ranks = _settings(job).batch_size, loads.ranks_of(job, asked.job, "-n M")
    own = -(-batch // ranks)
    samples = list(dict.fromkeys((own, max(1, own // FEW), min(batch, FEW * own))))
    found = layer_times.measure(job, sharing, samples, asked.wanted_options())
    if asked.keep_times is not None:
        write_text(Path(asked.keep_times), found.model_dump_json() + "\n")
    return found


def _limits(load: "RankLoad", settings: "TrainSettings", no_layers: str | None) -> "SplitLimits":
    from muster.collectives_bench.cost.advice.plans import SplitLimits

    made = settings.model.make is not None
    layers = 1 if made and no_layers else len(list(load.model.layers()))
    degrees = [] if made or not load.model.width else _tensor_degrees(settings, load.ranks)
    return SplitLimits(load.ranks, load.batch, layers, degrees, context=load.model.tokens if load.model.width else 0)


def _tensor_degrees(settings: "TrainSettings", ranks: int) -> list[int]:
    from muster.jobs.models.model_shape import resolve_shape
    from muster.jobs.models.shapes import GptShape

    shape = resolve_shape(settings.model, settings.model.vocabulary or GptShape.vocabulary)
    assert isinstance(shape, GptShape)
    sizes = (shape.heads, shape.d_ff, shape.vocabulary, *((shape.context,) if settings.sequence_parallel else ()))
    return [degree for degree in range(2, ranks + 1) if not any(size % degree for size in sizes)]


def _options(
    best: "Advised", site: "JobSite", options: Sequence[str], check: "Check", limit: float | None
) -> list[dict[str, Any]]:
    """Return the best plan's step with each option; a factor of None if the machine does not support it."""
    from muster.collectives_bench.cost.advice.search import judged
    from muster.collectives_bench.cost.advice.steptime import price

    rows = []
    for option in options:
        factor = site.times.factor(option)
        recompute = option == "activation_checkpointing"
        there = replace(
            site,
            options=(option,),
            load=replace(site.load, recompute=recompute or site.load.recompute),
            records=site.records or option == "cuda_graph",
        )
        row = judged(best.plan, price(best.plan, there), there, check, limit)
        rows.append({"option": option, "factor": factor, **({} if factor is None else _row(row))})
    return rows


def _row(row: "Advised") -> dict[str, Any]:
    return {
        "plan": row.plan.text,
        "mode": row.plan.way.name,
        "changes": row.plan.changes(),
        "step": row.step and vars(row.step),
        "parts": row.parts and {**vars(row.parts)},
        "memory": row.memory and row.memory.total,
        "why_not": row.why_not,
    }
