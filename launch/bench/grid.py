"""The worlds that `muster bench` measures: the typed request, and one prepared run for each world."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, Final

from muster.collectives_bench.settings import ALL, BenchSettings
from muster.jobs.basics.errors import RefusedError, UsageError
from muster.launch.bench import measuring, words
from muster.launch.bench.choices import Output
from muster.launch.bench.measuring import PreparedWorld
from muster.launch.common.program_words import COMMAND_LINE
from muster.launch.submit.hostsource import site_of
from muster.launch.submit.prepare import prepare, route_of
from muster.launch.submit.request import Request

RANKS_HERE: Final = 2  # default ranks on this machine without a job file, if it has fewer than two GPUs
NODES_AWAY: Final = 2  # default nodes of a queued job without a job file, if no hosts are named


@dataclass(frozen=True)
class BenchGrid:
    """The operations or job to measure, the settings that override the job file's, and the worlds."""

    what: str  # a job file or operations; "": measure pairs of nodes
    variants: list[dict[str, Any]]  # the settings; several if several backends are measured
    worlds: list[tuple[int | None, int | str | None]]  # nodes and ranks per node; None if not given
    request: Request  # the request for one world; its `nodes` and `ranks_per_node` are not used

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the first variant; the others differ only in the backend."""
        return self.variants[0]

    @property
    def is_pairs(self) -> bool:
        """True when messages between every pair of nodes are measured."""
        return "pairs" in self.settings


def check(grid: BenchGrid, output: Output) -> None:
    """Refuse contradictory options before anything starts.

    Raises:
        UsageError: if options contradict each other.
    """
    measuring.check(grid.request, output)
    what = grid.what
    if output.plot is not None and grid.is_pairs:
        raise UsageError(
            f"--plot {output.plot}: pairs are measured at one size, so there is no curve to plot; leave out --pairs or "
            "--plot"
        )
    if grid.is_pairs and ("wire" in grid.settings or (what and not words.is_file(what))):
        unused = "--wire" if "wire" in grid.settings else what
        raise UsageError(f"--pairs: measures messages between nodes, not operations; leave {unused} out")
    if not what and not grid.is_pairs:
        raise UsageError(
            "WHAT: is missing; name a job file, operations such as all_reduce,broadcast, or all; or give --pairs"
        )


def prepare_worlds(grid: BenchGrid) -> list[PreparedWorld]:
    """Prepare a run for each world before any run starts. A refused world has an error in place of a run.

    Raises:
        UsageError, JobFileError: if the command line or the job file is wrong.
        RefusedError: if no world is possible.
    """
    what, worlds = grid.what, []
    of_file = words.is_file(what)
    names = [] if of_file else words.operations(what) if what else [ALL]
    for (nodes, ranks), settings in itertools.product(grid.worlds, grid.variants):
        if of_file:
            changed = (*words.overrides(settings), *grid.request.overrides)
            per_node = None if ranks is None else str(ranks)
            request = replace(grid.request, job=what, nodes=nodes, ranks_per_node=per_node, overrides=changed)
        else:
            usual = usual_world(grid, nodes)
            nodes, ranks = nodes or usual[0], ranks or usual[1]
            text = words.job_text(names, settings, nodes, ranks)
            request = replace(grid.request, job=COMMAND_LINE, job_text=text)
        backend = f" backend={settings['backend']}" if len(grid.variants) > 1 else ""
        worlds.append(prepare_world(request, f"nodes={nodes} ranks_per_node={ranks}{backend}"))
    refusals = [world.refusal for world in worlds if world.refusal is not None]
    if len(refusals) == len(worlds):
        raise refusals[0]
    return worlds


def prepare_world(request: Request, label: str) -> PreparedWorld:
    """Prepare one run. Errors as for `prepare_worlds`, except that a refusal is returned in the result."""
    try:
        prepared = prepare(request)
    except RefusedError as error:
        return PreparedWorld(label, None, error)
    settings = prepared.context.job.settings
    if not isinstance(settings, BenchSettings):
        kind = prepared.context.job.kind
        raise UsageError(f"{request.job}: is a {kind}: job; muster bench measures bench: jobs, muster run runs it")
    if settings.is_hello:
        raise UsageError(f"{request.job}: the operation hello measures nothing; start the job with muster run")
    return PreparedWorld(label, prepared)


def usual_world(grid: BenchGrid, nodes: int | str | None) -> tuple[int, int]:
    """Return the default nodes and ranks per node.

    Remotely: all named hosts with one rank each. On this machine: one rank per GPU, but two if it has fewer GPUs.
    """
    route = route_of(grid.request, site_of(grid.request))
    if not route.is_here:
        return len(route.hosts.hosts) or NODES_AWAY, 1
    if grid.is_pairs:
        return 2, 1
    if nodes not in (None, 1):
        return 1, 1
    from muster.launch.common.host import visible_gpus

    gpus = len(visible_gpus()) if grid.settings.get("device") != "cpu" else 0
    return 1, gpus if gpus > 1 else RANKS_HERE
