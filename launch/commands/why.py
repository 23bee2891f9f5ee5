"""`muster why`: the first failure of a run, the ranks that failed because of it, all attempts, and what to do next."""

import argparse
import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.runfolder.rundir import RunDir, runs_root
from muster.launch.common import options, processes, rankset, screen
from muster.launch.common.event_rows import typed_lines
from muster.launch.common.follow import tail_lines
from muster.launch.look.history import ON_PURPOSE, AttemptHistory, EventsOfAttempts, read_history
from muster.launch.look.history_view import attempt_lines
from muster.launch.look.stragglers import with_stragglers
from muster.launch.records.advice import for_run, next_step
from muster.launch.records.runrows import Rows, read_ending, read_victims
from muster.launch.records.runstate import DIRECT, OVER, RunState, is_here, read_state
from muster.launch.records.stragglers import Straggler
from muster.launch.records.verdict import RankEnd, judge, lost_too
from muster.launch.sweeps.sweep import named_sweep

LAST_LINES: Final = 20
TOOK_ALONG: Final = {  # {why a rank ended: (verb for one rank, verb for several, reference to the first failure)}
    "peer": ("lost its connection", "lost their connection", " to it"),
    "stopped": ("was stopped", "were stopped", " because of it"),
    "own": ("failed", "failed", " after it"),
}


@dataclass(frozen=True)
class Explanation:
    """The reason for a run's current state.

    `first` and `victims` belong to `attempt`, the newest attempt with a verdict. `going_on` is the command that resumes
    the run and the step where it continues, or None.
    """

    run_id: str
    state: str
    class_name: str
    code: int | None
    message: str
    attempt: int | None
    started: float | None
    first: RankEnd | None
    victims: tuple[RankEnd, ...]
    known: tuple[str, ...]
    stragglers: tuple[Straggler, ...]
    history: AttemptHistory
    direct: bool  # the run had no supervisor
    next_step: str
    going_on: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the record for --json, with the key `class` as in event rows instead of `class_name`."""
        record = _as_in_rows(asdict(self))
        record["history"]["attempts"] = [_as_in_rows(each) for each in record["history"]["attempts"]]
        return record


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster why`."""
    parser.epilog = "muster why RUN\nmuster why sweep-vgg11    every point of a sweep that failed, or was lost"
    options.add_run(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the explanation of a run's state, or of the points of a sweep that are not done."""
    if (sweep := named_sweep(runs_root(args.runs), args.run)) is not None:
        from muster.launch.sweeps.sweep_show import explained

        print(explained(sweep, explain, render, as_json=args.json))
        return 0
    explanation = explain(options.the_run(args))
    print(json.dumps(explanation.to_json(), indent=2) if args.json else render(explanation))
    return 0


def explain(run: RunDir) -> Explanation:
    """Explain a run by the verdict of its newest attempt or, without a verdict, by its event rows."""
    reads: list[tuple[Rows, EventsOfAttempts]] = []  # events.jsonl may be large, so it is read once for both

    def read(folder: RunDir) -> Rows:
        rows, events = Rows(), EventsOfAttempts()
        for row in typed_lines(folder.events):
            rows.take(row)
            events.take(row)
        reads.append((rows, events))
        return rows

    state = with_stragglers(read_state(run, read))
    rows, events = reads[-1]
    rows_of_now = (row for row in typed_lines(run.attempts) if state.is_over or row.get("class") not in ON_PURPOSE)
    newest = deque(rows_of_now, maxlen=1)
    verdict = newest[0] if newest and _is_of_now(newest[0], state) else _verdict_of(state, rows)
    first = read_ending(verdict.get("first"))
    if state.is_over and state.class_name:  # the end of the run takes precedence over that of an attempt
        ended = {"class": state.class_name, "code": state.code, "message": state.message or verdict.get("message")}
        verdict = {**verdict, **ended, "next_step": verdict.get("next_step") if _agree(verdict, ended) else None}
    return Explanation(
        run_id=run.run_id,
        state=state.label,
        class_name=verdict.get("class") or "",
        code=verdict.get("code"),
        message=verdict.get("message") or "",
        attempt=verdict.get("attempt"),
        started=verdict.get("started") or state.started,
        first=first,
        victims=read_victims(verdict),
        known=_known(run, state, rows) if state.state == "lost" else (),
        stragglers=state.stragglers,
        history=read_history(run, state, events),
        direct=state.transport == DIRECT,
        next_step=_next_step(state, verdict),
        going_on=_resuming(state),
    )


def render(explanation: Explanation) -> str:
    """Format an explanation: headline, first failure, its victims, known facts, attempts, and what to do."""
    each = explanation
    lines = [_headline(each)]
    if each.first is not None:
        lines += ["", *_failure(each, each.first)]
    elif each.message:
        lines += ["", f"  {each.message}"]
    if followers := took_along(each.victims, first=each.first):
        lines += ["", f"  {followers}"]
    if each.known:
        lines += ["", "  what is known:", *(f"    {fact}" for fact in each.known)]
    for slow in each.stragglers:
        lines += ["", f"  slow: {slow.name}", f"    {slow.evidence}"]
    if len(each.history.attempts) > 1:
        lines += [
            "",
            *attempt_lines(
                each.history, ended=each.message if each.state in OVER and each.class_name != "done" else ""
            ),
        ]
    steps = [step for step in (each.next_step, each.going_on) if step]
    lines += [f"{lead} {step}" for lead, step in zip(("\nnext:", "then:"), steps, strict=False)]
    return "\n".join(lines)


def took_along(victims: tuple[RankEnd, ...], *, first: RankEnd | None) -> str:
    """Describe in one line what happened to the victims, and name nodes that were lost as a whole."""
    parts = []
    for cause, (one, several, link) in TOOK_ALONG.items():
        names = [each.rank for each in victims if each.cause == cause and each.rank is not None]
        if names:
            what = several if len(names) > 1 else one
            parts.append(f"rank{'s' * (len(names) > 1)} {rankset.fold(names)} {what}{link if first else ''}")
    return "; ".join(filter(None, (*parts, lost_too(victims))))


def _headline(each: Explanation) -> str:
    if each.state in ("done", "stopped"):
        return f"{each.run_id} is {each.state}" if each.state == "done" else f"{each.run_id} was stopped"
    if each.state == "failed":
        # The class `failed` is omitted, because it only repeats the state.
        what = [each.class_name] if each.class_name not in ("", "failed") else []
        what += [] if each.code is None else [f"exit code {each.code}"]
        return f"{each.run_id} failed" + (f": {', '.join(what)}" if what else "")
    if each.state == "lost":
        how = (
            "rank 0 ended without recording how" if each.direct else "its supervisor ended without recording a verdict"
        )
        return f"{each.run_id} is lost: {how}"
    if each.state == "lost?":
        return f"{each.run_id} may be lost: its supervisor on another host has not been heard from"
    if each.attempt is not None and (each.first is not None or each.code):
        return f"{each.run_id} is {each.state}; attempt {each.attempt} failed"
    return f"{each.run_id} is {each.state}; nothing has failed so far"


def _failure(each: Explanation, first: RankEnd) -> list[str]:
    after = "" if each.started is None else f", {screen.duration(first.ended - each.started)} after its start"
    attempt = f" of attempt {each.attempt}" if each.attempt else ""
    lines = [f"  first{attempt}: {first.sentence()}", f"  at {screen.clock(first.ended)}{after}"]
    if first.last_lines:
        lines += ["", "  its last lines:", *(f"    | {line}" for line in first.last_lines[-LAST_LINES:])]
    return lines


def _is_of_now(verdict: dict[str, Any], state: RunState) -> bool:
    """Return whether a verdict explains the current state: the run continues, or its last attempt has this verdict."""
    goes_on = not state.is_over and state.state != "lost"
    return goes_on or state.attempt in (None, verdict.get("attempt"))


def _verdict_of(state: RunState, rows: Rows) -> dict[str, Any]:
    """Reconstruct the missing verdict of a finished, direct or lost run from its rows."""
    endings = [ending for row in rows.exited if (ending := read_ending(row)) is not None]
    failed = [ending for ending in endings if ending.cause in ("own", "peer")]
    made = judge(endings, None).record() if failed else {}
    ended = {"class": state.class_name, "code": state.code, "message": state.message} if state.class_name else {}
    return {"attempt": state.attempt, **made, **ended}


def _agree(verdict: dict[str, Any], ended: dict[str, Any]) -> bool:
    """Return whether the run ended like its newest attempt, so that the attempt's advice still applies."""
    return all(verdict.get(key) == ended[key] for key in ("class", "message"))


def _next_step(state: RunState, verdict: dict[str, Any]) -> str:
    """Return advice on what to do next, without the command that resumes the run (see `_resuming`)."""
    run = RunDir(Path(state.path))
    if not state.is_over and state.state != "lost":
        return f"{run.command('watch')} follows it, {run.command('logs -f')} shows its output"
    if state.state == "done" or (state.state == "stopped" and _resuming(state)):
        return ""
    first, message = verdict.get("first"), str(verdict.get("message") or "")
    class_name, given = str(verdict.get("class") or ""), verdict.get("next_step")
    if (
        state.state == "lost" and first is None
    ) or state.class_name == "stopped":  # the verdict's advice does not consider checkpoints
        class_name, given = state.state + "-unsaved" * (_resuming(state) is None), None
        if state.state == "lost" and state.transport == DIRECT:
            class_name = "lost-direct"
    given = given or next_step(class_name, first, message)
    return for_run(str(given), run)


def _resuming(state: RunState) -> str | None:
    """Return the command that resumes a run that is over, or None if it cannot be resumed."""
    if state.state == "done" or not (state.is_over or state.state == "lost"):
        return None
    resume = state.continue_with or RunDir(Path(state.path)).command("resume")
    if state.checkpoint is not None:
        mended = "once the change is undone, " * (state.code == exits.REFUSED)
        where = f"continues after step {state.checkpoint.step} ({state.checkpoint.name})"
        return f"{mended}{resume} {where}"
    return f"{resume} starts the program again" if state.kind == "command" else None


def _as_in_rows(record: dict[str, Any]) -> dict[str, Any]:
    return {"class" if key == "class_name" else key: value for key, value in record.items()}


def _known(run: RunDir, state: RunState, rows: Rows) -> tuple[str, ...]:
    """List facts about a lost run: when its supervisor last wrote, its last step, and processes still running."""
    who = "rank 0" if state.transport == DIRECT else "its supervisor"
    facts = [f"{who} was pid {state.pid} on {state.host}; it last wrote at {screen.clock(rows.last_time)}"]
    if state.step is not None:
        facts.append(f"the last recorded step is {state.progress}")
    ended = [each.rank for each in state.ranks if each.state != "unknown"]
    some = f"rank{'s' * (len(ended) > 1)} {rankset.fold(ended)} had ended"
    facts.append(some if ended else "no rank is known to have ended")
    if is_here(state.host):
        left = processes.of_run(run.run_id)
        pids = f": pids {', '.join(map(str, left))}" if left else ""
        facts.append(f"{len(left)} of its processes still run on this host{pids}")
    silent = [each.rank for each in state.ranks if each.state == "unknown"]
    for rank in silent[:1]:
        attempt = run.attempt(state.attempt or 0)
        lines = tail_lines(attempt.err(rank), 5) or tail_lines(attempt.out(rank), 5)
        facts += [f"rank {rank} last wrote:", *(f"  | {line}" for line in lines)] if lines else []
    return tuple(facts)
