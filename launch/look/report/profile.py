"""What a page shows of a run's profiles: shares by kind of operator and of module, flame graphs, memory over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics.reading import read_json
from muster.jobs.basics.words import counted
from muster.jobs.runfolder.profiledir import ProfileDir
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.trace.flame import WIDTH, Box, lay_out, spell, tree_of
from muster.jobs.trace.record import numbers
from muster.launch.common.fields import fits, number, real, reals, text
from muster.launch.look.plots.series import Plot, Series
from muster.launch.look.profiles import RankProfile, read_profiles
from muster.launch.look.report.pictures import Picture, Styles, picture_of
from muster.launch.look.report.tables import Table, table

MOST_RANKS: Final = 8
MOST_FRAMES: Final = 30  # in the table
MB: Final = 1 << 20
FRAME: Final = (number, text, text, real, number)
ALLOCATION: Final = {"bytes": number, "operator": text, "module": text, "step": number, "alive_s": real}


@dataclass(frozen=True)
class Flame:
    """A flame graph: what it is of, its frames as percent of the width, and the widest as a table."""

    title: str
    frames: tuple[dict[str, Any], ...]
    rows: int
    widest: Table


@dataclass(frozen=True)
class ProfileView:
    """All of a run's profiles."""

    title: str
    pictures: tuple[Picture, ...]
    flames: tuple[Flame, ...]
    allocations: Table | None
    missing: tuple[str, ...]


def view_of(run: RunDir, styles: Styles) -> ProfileView:
    """Read the profiles of a run; the slowest ranks are shown.

    Raises:
        NotFoundError: there are none.
    """
    attempt, found = read_profiles(run, None)
    shown = sorted(found[:MOST_RANKS], key=lambda each: each.rank)
    slowest, missing = found[0], list[str]()
    plots = (_shares("kinds", "Time by kind of operator", shown), _shares("modules", "Time by kind of module", shown))
    drawn = [picture_of(each, styles) for each in (*plots, _memory(shown)) if each is not None]
    if not _named(slowest, "modules"):
        missing.append("the profile does not say which modules its operators belong to")
    flames = _flames(ProfileDir(slowest.folder), slowest.rank, missing)
    steps = numbers([int(step["step"]) for step in slowest.record["steps"]])
    title = f"attempt {attempt}, {steps}: {counted(len(shown), 'rank')} of {len(found)} profiled"
    return ProfileView(title, tuple(drawn), tuple(flames), _allocations(slowest), tuple(missing))


def _named(profile: RankProfile, key: str) -> Mapping[str, float]:
    found = reals(profile.record.get(key)) or {}
    return {name[:40]: seconds for name, seconds in list(found.items())[:40] if seconds > 0.0}


def _shares(key: str, title: str, profiles: Sequence[RankProfile]) -> Plot | None:
    of_ranks = {f"rank {each.rank}": (_named(each, key), max(1, len(each.record["steps"]))) for each in profiles}
    names = list(dict.fromkeys(name for found, _ in of_ranks.values() for name in found))
    series = [
        Series(name, tuple(of_ranks), tuple(found.get(name, 0.0) / steps for found, steps in of_ranks.values()))
        for name in names
    ]
    return Plot(key, title, "", "time of a step", tuple(series), "stacked", "s") if series else None


def _memory(profiles: Sequence[RankProfile]) -> Plot | None:
    series = []
    for each in profiles:
        points = each.record.get("memory_over_time")
        if fits(points, [[real]]) and points and all(len(point) == 2 for point in points):
            times, sizes = ((1e3 * time for time, _ in points), (float(size) for _, size in points))
            series.append(Series(f"rank {each.rank}", tuple(times), tuple(sizes)))
    return Plot("allocated", "Memory over time", "ms", "allocated", tuple(series), unit="B") if series else None


def _allocations(profile: RankProfile) -> Table | None:
    rows = profile.record.get("allocations")
    if not rows or not fits(rows, [ALLOCATION]):
        return None
    cells = (
        (row["operator"], row["module"], f"{row['bytes'] / MB:,.2f}", row["step"], f"{1e3 * row['alive_s']:.1f}")
        for row in rows[:20]
    )
    columns = ("operator", "module", "MB>", "step>", "alive ms>")
    return table(f"Largest allocations at the peak of rank {profile.rank}", columns, cells)


def _flames(folder: ProfileDir, rank: int, missing: list[str]) -> list[Flame]:
    try:
        record = read_json(folder.flame_data)
        found = record if isinstance(record, dict) else {}
        wanted = {"host": f"Host threads of rank {rank}", "device": f"GPU of rank {rank}, by what launched the kernels"}
        return [_flame(title, found[key]) for key, title in wanted.items() if key in found]
    except (OSError, ValueError) as error:  # of an earlier version, or torn
        missing.append(f"there is no flame graph of rank {rank}: {error}")
        return []


def _flame(title: str, rows: Any) -> Flame:
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == len(FRAME) and all(fits(*each) for each in zip(row, FRAME, strict=True))
        for row in rows
    ):
        raise ValueError("its rows are not frames")
    root = tree_of(rows)
    boxes = lay_out(root)
    widest = sorted(boxes, key=lambda box: -box.frame.value_us)[:MOST_FRAMES]
    cells = ((*_words(box, root.value_us), box.frame.calls) for box in widest)
    listed = table(f"{title}: widest frames", ("frame", "time>", "share>", "kind", "calls>"), cells)
    return Flame(title, tuple(_placed(box, root.value_us) for box in boxes), max(box.row for box in boxes) + 1, listed)


def _words(box: Box, total_us: float) -> tuple[str, str, str, str]:
    frame = box.frame
    return frame.name, spell(frame.value_us), f"{frame.value_us / total_us if total_us else 0.0:.1%}", frame.kind


def _placed(box: Box, total_us: float) -> dict[str, Any]:
    name, time, share, kind = _words(box, total_us)
    left, width = (f"{100 * each / WIDTH:.4f}".rstrip("0").rstrip(".") for each in (box.left, box.width))
    return {"name": name, "about": f"{time}, {share}, {kind}", "kind": kind, "x": left, "width": width, "row": box.row}
