"""The section of a report about one run: end, attempts, measured and predicted memory, placement, versions, and job."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.reading import SETTINGS_BYTES, read_bytes, read_json
from muster.jobs.basics.words import counted
from muster.jobs.hosts.placement import Placement
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import screen
from muster.launch.common.event_rows import typed_lines
from muster.launch.common.fields import text
from muster.launch.look.history import PARTS, AttemptHistory, AttemptRecord
from muster.launch.look.history_view import shares_text
from muster.launch.look.memories import formula_of, fullest, read_memories
from muster.launch.look.memory_view import COLUMNS, cells
from muster.launch.look.report.pictures import Styles
from muster.launch.look.report.profile import ProfileView, view_of
from muster.launch.look.report.tables import Table, table
from muster.launch.records.runstate import RunState, read_state

T = TypeVar("T")
MOST_RANKS: Final = 4  # maximum number of ranks whose memory is shown
MOST_ROWS: Final = 200  # maximum number of rows in a table of attempts or nodes


@dataclass(frozen=True)
class RunView:
    """The section about one run; `missing` has a line for each part that is missing or unreadable."""

    run_id: str
    state: RunState | None
    facts: tuple[tuple[str, str], ...]
    why: str
    attempts: Table | None
    memory: Table | None
    placement: Table | None
    profile: ProfileView | None
    job: str
    missing: tuple[str, ...]
    peak_formula: float | None  # bytes of the fullest rank

    @property
    def ended_well(self) -> bool:
        """True if the state is known and the run neither failed nor was lost."""
        return self.state is not None and self.state.state not in ("failed", "lost")


def view_of_run(
    run: RunDir, why_of: Callable[[RunDir], tuple[AttemptHistory, str]], styles: Styles, *, profile: bool
) -> RunView:
    """Collect the section about one run; `profile` includes its profiles."""
    missing: list[str] = []

    def part(what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (MusterError, OSError, ValueError) as error:
            missing.append(f"{what}: {error}")
            return None

    state = part("state", lambda: read_state(run))
    explained = part("attempts", lambda: why_of(run))
    memory = part("memory", lambda: _memory(run))
    return RunView(
        run_id=run.run_id,
        state=state,
        facts=(
            *(_facts(state) if state else ()),
            *((("goodput", shares_text(explained[0].shares)),) if explained and explained[0].shares else ()),
            *(part("versions", lambda: _versions(run)) or ()),
        ),
        why=explained[1] if explained and (state is None or state.state != "done" or state.restarts) else "",
        attempts=_attempts(explained[0]) if explained and explained[0].attempts else None,
        memory=memory[0] if memory else None,
        placement=part("placement", lambda: _placement(run)),
        profile=part("profile", lambda: view_of(run, styles)) if profile else None,
        job=part("job file", lambda: read_bytes(run.job, SETTINGS_BYTES).decode(errors="replace")) or "",
        missing=tuple(missing),
        peak_formula=memory[1] if memory else None,
    )


def _facts(state: RunState) -> Iterator[tuple[str, str]]:
    yield "state", state.label if state.outcome in (None, state.label) else f"{state.label}: {state.outcome}"
    yield "started", screen.clock(state.started)
    yield "took", screen.duration(state.seconds)
    yield "ranks", f"{state.world_size or '-'} on {counted(state.nodes or 0, 'node')}"
    yield "steps", state.progress or "none"
    yield "started by", f"{state.transport or 'hand'} on {state.host or 'an unknown host'}"
    if state.checkpoint is not None:
        yield "checkpoint", state.checkpoint.name


def _versions(run: RunDir) -> list[tuple[str, str]]:
    """Return the versions and the device that rank 0 recorded in the newest attempt with such a record."""
    for attempt in reversed(run.attempt_numbers()):
        for row in islice(typed_lines(run.attempt(attempt).memory(0)), 1):
            return [(name, found) for name in ("python", "torch", "device") if (found := text(row.get(name)))]
    return []


def _attempts(history: AttemptHistory) -> Table:
    columns = ["attempt", "started", "ranks>", "hosts", "steps>", "end", "steps lost>", "lost s>"]
    columns += [f"{part.removesuffix('_s')}>" for part in PARTS]
    shown = history.attempts[-MOST_ROWS:]
    left_out = len(history.attempts) - len(shown)
    caption = f"Attempts, and the time lost after each{f' (the first {left_out} are left out)' if left_out else ''}"
    total = ["all", "", "", "", "", "", history.lost_steps, f"{history.lost_s:.2f}"]
    return table(caption, columns, [*map(_attempt, shown), [*total, *([""] * len(PARTS))]])


def _attempt(each: AttemptRecord) -> list[object]:
    done = None if each.last_step is None else f"{each.from_step + 1} to {each.last_step}"
    hosts = list(dict.fromkeys(each.hosts))
    named = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    lost = sum(each.lost_s.values()) if each.lost_s else None
    seconds = [lost, *(each.lost_s.get(part) for part in PARTS)]
    facts = [each.attempt, screen.clock(each.started), each.world_size, named, done, each.cause or "running"]
    return [*facts, each.lost_steps or None, *(None if value is None else f"{value:.2f}" for value in seconds)]


def _memory(run: RunDir) -> tuple[Table, float | None]:
    attempt, every = read_memories(run, None)
    fullest_first = sorted(fullest(every, MOST_RANKS), key=lambda each: -each.peak)
    shown = [(each, formula_of(run, each)) for each in fullest_first]
    formula = shown[0][1]
    caption = f"Memory of the fullest {len(shown)} of {len(every)} ranks, attempt {attempt}"
    caption += "" if formula else ("; the formula's memory is unknown: muster memory RUN shows why")
    return table(caption, COLUMNS, cells(shown)), formula.total if formula else None


def _placement(run: RunDir) -> Table:
    attempt = max(run.attempt_numbers(), default=0)
    nodes = Placement.from_json(read_json(run.attempt(attempt).placement)).nodes
    rows = (
        (each.node_rank, each.host, each.address, f"{each.first_rank} to {each.first_rank + each.ranks - 1}")
        for each in nodes[:MOST_ROWS]
    )
    more = f", the first {MOST_ROWS}" if len(nodes) > MOST_ROWS else ""
    return table(
        f"Placement of attempt {attempt}: {counted(len(nodes), 'node')}{more}",
        ("node", "host", "address", "ranks"),
        rows,
    )
