"""The stragglers of a run for its views: as its supervisor named them, or from its files if it has no supervisor."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import MusterError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.runrows import first_and_last_step
from muster.launch.records.runstate import DIRECT, RunState
from muster.launch.records.stragglers import Place, Straggler, stragglers_of, teams_of

UNMEASURED: Final = (
    "waits are not measured in recorded steps (CUDA graphs), in pipelines on GPUs and in programs with a session"
)


def with_stragglers(state: RunState) -> RunState:
    """Return the state with the stragglers of a run that has no supervisor; any other state is unchanged."""
    if state.transport != DIRECT or state.kind != "train" or (state.world_size or 0) < 2:
        return state
    return replace(state, stragglers=_from_files(RunDir(Path(state.path)), state))


def why_unjudged(state: RunState) -> str:
    """Return why nobody is named although ranks do steps together: their waits are not measured; "" if they are."""
    if (state.world_size or 0) < 2 or state.stragglers:
        return ""
    try:
        _, row = first_and_last_step(RunDir(Path(state.path)), state.attempt or 0)
    except (MusterError, OSError):  # the file cannot be read
        return ""
    if "step_s" not in row or ("communication_s" in row and row.get("forward_s")):
        return ""
    return f"unknown: {UNMEASURED}, so slow ranks cannot be told from those that wait for them"


def places_in(state: RunState) -> Mapping[int, Place]:
    """Return the place of each rank, as far as it is known."""
    return {each.rank: Place(each.node, each.host or "?") for each in state.ranks if each.node is not None}


def _from_files(run: RunDir, state: RunState) -> tuple[Straggler, ...]:
    from muster.jobs.spec.expand import split_of
    from muster.jobs.spec.load import load_job
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.common.kinds import KINDS
    from muster.launch.records.paces import judged_at_once

    try:
        settings = load_job(run.job, KINDS, allow_unread=True).job.settings
        if not isinstance(settings, TrainSettings):
            return ()
        teams = teams_of(split_of(settings, state.world_size or 1))
        return tuple(stragglers_of(judged_at_once(run.attempt(state.attempt or 0), teams), teams, places_in(state)))
    except (MusterError, OSError):  # the job or a file cannot be read
        return ()
