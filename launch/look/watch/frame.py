"""The layout of `muster watch` for a terminal of any size: facts, then a table of ranks or nodes, then the keys.

All text from the run is escaped before its width is measured. If the table does not fit, the least important columns
and the last rows are omitted, and marked rows come first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from muster.collectives_bench.sizes import size_text
from muster.jobs.basics.terminal import printable
from muster.jobs.basics.words import counted
from muster.launch.common import screen
from muster.launch.common.rankset import fold
from muster.launch.look.watch.watched import MARKS, RankSight, WatchedRun

LABEL: Final = 9  # columns
LEAST_ROWS: Final = 4  # minimum number of rows reserved for the table
MOST_LINES: Final = 3  # maximum number of lines of one fact
MOST_SLOW: Final = 3  # stragglers that are described; their ranks are marked in the table
WIDEST_HOST: Final = 24
STYLES: Final = {"failed": "bold red", "suspended": "bold red", "hang": "bold red", "silent": "red", "slow": "yellow"}
KEYS: Final = "q quit  j k scroll  r ranks  n nodes"


@dataclass(frozen=True)
class ViewChoice:
    """The user's choices. `view` is "ranks", "nodes", or "" (ranks if all fit); `top` counts the rows scrolled off."""

    view: str = ""
    top: int = 0
    ranks: frozenset[int] | None = None


@dataclass(frozen=True)
class WatchFrame:
    """A drawn frame: its lines, the ranks with a visible row, and the choice with `top` limited to existing rows."""

    lines: list[Text]
    ranks: frozenset[int]
    choice: ViewChoice


@dataclass(frozen=True)
class _TableRow:
    """A row of the table: a rank or a node."""

    ranks: tuple[RankSight, ...]
    mark: str


def draw(watched: WatchedRun, choice: ViewChoice, width: int, height: int | None) -> WatchFrame:
    """Draw a frame of `width` columns and at most `height` lines; None means no limit."""
    facts = _facts(watched, width)
    if height is not None:
        facts = facts[: max(1, height - LEAST_ROWS - 2)]
    ranks = [each for each in watched.ranks if choice.ranks is None or each.rank in choice.ranks]
    if not ranks:
        return _frame([*facts, *([Text(KEYS, style="dim")] if height is not None else [])], width, height, choice)
    room = len(ranks) if height is None else max(1, height - len(facts) - 3)
    by_rank = choice.view == "ranks" or (not choice.view and (len(ranks) <= room or choice.ranks is not None))
    rows = [_TableRow((each,), each.mark) for each in ranks] if by_rank else _nodes(ranks)
    if len(rows) > room:
        rows.sort(key=lambda row: MARKS.index(row.mark) if row.mark else len(MARKS))
    top = max(0, min(choice.top, len(rows) - room))
    shown = rows[top : top + room]
    lines = [*facts, Text(), *_table(RANK_COLUMNS if by_rank else NODE_COLUMNS, shown, width)]
    if height is not None:
        part = f"{top + 1}-{top + len(shown)} of {counted(len(rows), 'rank' if by_rank else 'node')}"
        lines.append(Text(f"{part}  {KEYS}", style="dim"))
    seen = [each.rank for row in shown for each in row.ranks] if by_rank else []
    return _frame(lines, width, height, replace(choice, top=top), seen)


def _frame(
    lines: list[Text], width: int, height: int | None, choice: ViewChoice, ranks: Iterable[int] = ()
) -> WatchFrame:
    for line in lines:
        line.truncate(width)
    return WatchFrame(lines[:height], frozenset(ranks), choice)


# Facts ----------------------------------------------------------------------------------------------------------------


def _facts(watched: WatchedRun, width: int) -> list[Text]:
    state = watched.state
    pairs = [
        ("run", f"{state.run_id}  {state.label}", screen.STYLES.get(state.state, "")),
        ("attempt", _attempt(watched), ""),
        ("because", watched.why, ""),
        ("doing", state.doing, "yellow"),
        ("outcome", state.outcome, ""),
        ("message", None if state.message is None else state.message.partition("\n")[0], ""),
        ("step", _step(watched), ""),
        ("loss", _loss(watched), ""),
        ("saved", _saved(watched), ""),
        ("ranks", _ranks(watched.ranks), ""),
        *(("slow", f"{each.name}: {each.evidence}", "yellow") for each in state.stragglers[:MOST_SLOW]),
        *(("warning", text, "") for text in state.warnings[-2:]),
    ]
    return [line for what, text, style in pairs if text for line in _fact(what, text, style, width)]


def _fact(what: str, text: str, style: str, width: int) -> Iterable[Text]:
    """Yield a fact as lines, with its text wrapped beside its label."""
    room = max(1, width - LABEL)
    lines: list[str] = []
    for word in _one_line(text).split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    for number, line in enumerate(lines[:MOST_LINES]):
        label = Text(f"{what if number == 0 else '':{LABEL}}"[: max(0, width - 1)], style="bold")
        yield label + Text(line, style=style)


def _one_line(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\t", " ")


def _attempt(watched: WatchedRun) -> str:
    state = watched.state
    parts = ["none yet" if state.attempt is None else str(state.attempt)]
    if state.restarts:
        parts.append(f"after {counted(state.restarts, 'restart')}")
    took = screen.duration(state.seconds)
    parts.append(f"took {took}" if state.is_over else f"submitted {took} ago")
    return ", ".join(parts)


def _step(watched: WatchedRun) -> str | None:
    state = watched.state
    if watched.step is None:
        return None
    parts = [f"{watched.step} of {state.steps}" if state.steps is not None else str(watched.step)]
    if watched.pace_s:
        parts.append(f"{1 / watched.pace_s:.3g} steps/s")
    if state.rate is not None:
        parts.append(state.rate.words(state.unit)[0])
    if watched.left_s is not None and not any(each.mark == "hang" for each in watched.ranks):
        parts.append(f"{screen.duration(watched.left_s)} left")
    return ", ".join(parts)


def _loss(watched: WatchedRun) -> str | None:
    parts = [] if watched.state.loss is None else [f"{watched.state.loss:.4f}"]
    if watched.communication is not None:
        parts.append(f"communication {_percent(watched.communication)} of a step")
    return ", ".join(parts)


def _saved(watched: WatchedRun) -> str | None:
    """Format the newest checkpoint, when the next one is due, and what a failure now would lose."""
    state, lost = watched.state, watched.lost_steps
    kept, parts = state.checkpoint, []
    if kept is not None:
        parts.append(f"step {kept.step}")
    elif watched.saves is None or watched.step is None:
        return None
    else:
        parts.append("nothing yet" if watched.saves else "no checkpoints")
    if watched.next_save is not None:
        due, in_s = watched.next_save
        parts.append(f"next at step {due} in {screen.duration(in_s)}")
    if lost is not None:
        cost = "" if watched.pace_s is None else f", {screen.duration(lost * watched.pace_s)}"
        parts.append(f"a failure now loses {counted(lost, 'step')}{cost}")
    return "; ".join(parts)


def _ranks(ranks: Sequence[RankSight]) -> str | None:
    """Format the numbers of ranks by phase and by mark."""
    doing = [each.phase for each in ranks]
    marks = [each.mark for each in ranks]
    counts = [f"{doing.count(phase):,} {phase}" for phase in dict.fromkeys(doing)]
    marked = [f"{marks.count(mark):,} {mark}" for mark in MARKS if mark in marks and mark not in doing]
    return "; ".join(", ".join(each) for each in (counts, marked) if each)


# The table ------------------------------------------------------------------------------------------------------------

Column = tuple[
    str, int, Callable[[_TableRow], str]
]  # heading (> aligns right), importance (0: always shown; highest dropped first), text of a row


def _nodes(ranks: Sequence[RankSight]) -> list[_TableRow]:
    by_node: dict[int, list[RankSight]] = {}
    for each in ranks:
        by_node.setdefault(-1 if each.node is None else each.node, []).append(each)
    rows = []
    for node in sorted(by_node):
        members = by_node[node]
        marks = [each.mark for each in members if each.mark]
        rows.append(_TableRow(tuple(members), min(marks, key=MARKS.index, default="")))
    return rows


def _cell(field: str, combine: Callable[[list[Any]], Any], text: Callable[[Any], str]) -> Callable[[_TableRow], str]:
    """Return a function that formats one field of a row, combined over the ranks with a value, or "-" without any."""

    def cell(row: _TableRow) -> str:
        known = [value for each in row.ranks if (value := getattr(each, field)) is not None]
        return text(combine(known)) if known else "-"

    return cell


def _span(known: list[int]) -> str:
    return str(known[0]) if min(known) == max(known) else f"{min(known)}-{max(known)}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _node(row: _TableRow) -> str:
    return "-" if row.ranks[0].node is None else str(row.ranks[0].node)


def _host(row: _TableRow) -> str:
    host = _one_line(row.ranks[0].host or "-")
    return host if cell_len(host) <= WIDEST_HOST else set_cell_size(host, WIDEST_HOST)


def _phases(row: _TableRow) -> str:
    return _one_line(",".join(dict.fromkeys(each.phase for each in row.ranks)))[:WIDEST_HOST]


def _marked(row: _TableRow) -> str:
    count = sum(each.mark == row.mark for each in row.ranks)
    return row.mark if len(row.ranks) == 1 or not row.mark else f"{count} {row.mark}"


COMMON: Final[tuple[Column, ...]] = (
    ("step>", 0, _cell("step", _span, str)),
    ("phase", 1, _phases),
    ("seen>", 2, _cell("seen_s", max, "{:.0f} s".format)),
    ("step time>", 3, _cell("step_s", max, _time)),
    ("comm>", 4, _cell("communication", fmean, _percent)),
    ("gpu>", 4, _cell("gpu_percent", fmean, "{:.0f} %".format)),
    ("gpu memory>", 5, _cell("gpu_bytes", max, size_text)),
    ("mark", 0, _marked),
)
RANK_COLUMNS: Final[tuple[Column, ...]] = (
    ("rank>", 0, lambda row: str(row.ranks[0].rank)),
    ("node>", 5, _node),
    ("host", 6, _host),
    *COMMON,
)
NODE_COLUMNS: Final[tuple[Column, ...]] = (
    ("node>", 0, _node),
    ("host", 6, _host),
    ("ranks", 5, lambda row: fold(each.rank for each in row.ranks)),
    *COMMON,
)


def _table(columns: Sequence[Column], rows: Sequence[_TableRow], width: int) -> list[Text]:
    """Return the heading and a line for each row, without the columns that do not fit."""
    texts = [(name, importance, [name.rstrip(">"), *map(cell, rows)]) for name, importance, cell in columns]
    texts = [
        each for each in texts if not each[0].startswith("gpu") or set(each[2][1:]) != {"-"}
    ]  # GPU columns only if a rank has a GPU
    wide = {name: max(map(cell_len, column)) for name, _, column in texts}
    while len(texts) > 1 and sum(wide[name] + 2 for name, _, _ in texts) - 2 > width:
        texts.remove(max(texts, key=lambda each: each[1]))
    by_column = [[_aligned(text, wide[name], name) for text in column] for name, _, column in texts]
    head, *body = ("  ".join(cells).rstrip() for cells in zip(*by_column, strict=True))
    styles = ["bold", *(STYLES.get(row.mark, "") for row in rows)]
    return [Text(line, style) for line, style in zip([head, *body], styles, strict=True)]


def _aligned(text: str, wide: int, name: str) -> str:
    room = " " * (wide - cell_len(text))
    return room + text if name.endswith(">") else text + room
