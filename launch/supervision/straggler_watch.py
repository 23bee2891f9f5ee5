"""Watch the paces of the ranks during a run, and log the ranks that are persistently slow when they change.

Files are read in a thread, because network storage may answer late. `launch/records/paces.py` limits the reading to a
hundredth of a core, and `launch/records/stragglers.py` decides.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from muster.jobs.basics.errors import MusterError
from muster.jobs.spec.expand import split_of
from muster.launch.records.eventlog import EventLog
from muster.launch.records.stragglers import Place, stragglers_of, teams_of
from muster.launch.supervision.attempt import Attempt

IDLE_S: Final = 1.0  # between two looks for a new attempt


async def watch_stragglers(current: Callable[[], Attempt | None], log: EventLog) -> None:
    """Watch one attempt after the other until cancelled. Each change is an event `slow`, with all stragglers."""
    from muster.launch.records.paces import PaceWatch

    watch: PaceWatch | None = None
    watched: Attempt | None = None
    while True:
        await asyncio.sleep(IDLE_S)
        attempt = current()
        if attempt is None or attempt.job.kind != "train" or attempt.story.first_step is None or attempt.is_stopping:
            continue
        if attempt is not watched:
            context, watched = attempt.context, attempt
            split = split_of(context.job.settings, context.placement.world_size)  # type: ignore[arg-type]
            watch = PaceWatch(context.run.attempt(context.attempt), teams_of(split))
        assert watch is not None
        if not watch.teams:
            continue
        try:
            before = watch.found.keys()
            pause_s = await asyncio.to_thread(watch.look)
        except (OSError, MusterError):  # the files of a rank cannot be read now
            continue
        if watch.found.keys() != before and attempt is current() and not attempt.is_stopping:
            stragglers = stragglers_of(watch.found, watch.teams, places_of(attempt))
            log.tell("slow", attempt=attempt.number, stragglers=[each.record() for each in stragglers])
        await asyncio.sleep(max(0.0, pause_s - IDLE_S))


def places_of(attempt: Attempt) -> Mapping[int, Place]:
    """Return the place of every rank of an attempt. If every rank of a node has a GPU, it is the one of its number."""
    places, on_gpus = {}, getattr(attempt.job.settings, "device", "cpu") != "cpu"
    for node, state in zip(attempt.context.placement.nodes, attempt.roster.nodes, strict=True):
        each_has_one = on_gpus and state.hello is not None and len(state.hello.gpus) >= node.ranks
        for local, rank in enumerate(node.rank_range):
            places[rank] = Place(node.node_rank, state.host, local if each_has_one else None)
    return places
