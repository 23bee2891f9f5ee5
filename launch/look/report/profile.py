"""The profile section of a report: time by kind of operator and module, flame graphs, and memory over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.trace.flame import HUES, spell
from muster.jobs.trace.record import numbers
from muster.launch.look.plots.series import Plot, PlotSeries
from muster.launch.look.profiles import FlameFrame, RankProfile, read_flame, read_profiles
from muster.launch.look.report.pictures import Picture, Styles, picture_of
from muster.launch.look.report.tables import Table, table

MOST_RANKS: Final = 8
MOST_LISTED: Final = 30  # maximum number of frames in the table
MOST_KINDS: Final = 7  # maximum number of kinds with a colour of their own
NARROWEST: Final = 5e-4  # narrower frames are omitted; a fraction of the flame graph's width
MOST_FRAMES: Final = 800
DEEPEST: Final = 100
MB: Final = 1 << 20


@dataclass(frozen=True)
class Flame:
    """A flame graph: title, frames in percent of the width, and a table of the widest frames."""

    title: str
    frames: tuple[dict[str, Any], ...]
    rows: int
    widest: Table


@dataclass(frozen=True)
class ProfileView:
    """The profile section of one run."""

    title: str
    pictures: tuple[Picture, ...]
    flames: tuple[Flame, ...]
    allocations: Table | None
    missing: tuple[str, ...]


def view_of(run: RunDir, styles: Styles) -> ProfileView:
    """Build the profile section of a run, for its slowest ranks.

    Raises:
        NotFoundError: if the run has no profiles.
    """
    attempt, found = read_profiles(run, None)
    slowest, shown = found[0], sorted(found[:MOST_RANKS], key=lambda each: each.rank)
    plots = (_shares("kinds", "Time by kind of operator", shown), _shares("modules", "Time by kind of module", shown))
    drawn = [picture_of(each, styles) for each in (*plots, _memory(shown)) if each is not None]
    flames = [_flame(title.format(slowest.rank), frames) for title, frames in _frames(slowest) if frames]
    missing = [
        f"damaged in the profile of rank {each.rank}: {', '.join(each.left_out)}" for each in shown if each.left_out
    ]
    if "modules" not in slowest.record:
        missing.append(slowest.record.get("modules_note") or "the profile has no times of modules")
    missing += [] if flames else [f"the flame graph of rank {slowest.rank} is missing or damaged"]
    steps = numbers([int(step["step"]) for step in slowest.record["steps"]])
    title = f"attempt {attempt}, {steps}: {counted(len(shown), 'rank')} of {len(found)} profiled"
    return ProfileView(title, tuple(drawn), tuple(flames), _allocations(slowest), tuple(missing))


def _shares(key: str, title: str, profiles: Sequence[RankProfile]) -> Plot | None:
    found = {f"rank {each.rank}": (each.record.get(key, {}), max(1, len(each.record["steps"]))) for each in profiles}
    totals: dict[str, float] = {}
    for seconds, _ in found.values():
        for name, value in seconds.items():
            totals[name] = totals.get(name, 0.0) + max(value, 0.0)
    largest = sorted(totals, key=lambda name: -totals[name])
    groups = {name: [name] for name in largest[:MOST_KINDS]}
    if len(largest) > MOST_KINDS:
        groups["all others"] = largest[MOST_KINDS:]
    series = [
        PlotSeries(name, tuple(found), tuple(_sum(seconds, kinds) / steps for seconds, steps in found.values()))
        for name, kinds in groups.items()
    ]
    return Plot(key, title, "", "time of a step", tuple(series), "stacked", "s") if series else None


def _sum(seconds: Mapping[str, float], kinds: Sequence[str]) -> float:
    return sum(max(seconds.get(kind, 0.0), 0.0) for kind in kinds)


def _memory(profiles: Sequence[RankProfile]) -> Plot | None:
    series = []
    for each in profiles:
        if points := each.record.get("memory_over_time"):
            times, sizes = ((1e3 * time for time, _ in points), (float(size) for _, size in points))
            series.append(PlotSeries(f"rank {each.rank}", tuple(times), tuple(sizes)))
    return Plot("allocated", "Memory of tensors over time", "ms", "memory", tuple(series), unit="B") if series else None


def _allocations(profile: RankProfile) -> Table | None:
    rows = profile.record.get("allocations")
    cells = (
        (
            row["operator"],
            row["module"],
            f"{row['bytes'] / MB:,.2f}",
            row["step"] or "before",
            f"{1e3 * row['alive_s']:.1f}",
        )
        for row in rows or ()
    )
    columns = ("operator", "module", "MB>", "step>", "alive ms>")
    return table(f"Largest allocations at the peak of rank {profile.rank}", columns, cells) if rows else None


def _frames(profile: RankProfile) -> list[tuple[str, tuple[FlameFrame, ...]]]:
    return [
        ("Host threads of rank {}", read_flame(profile)),
        ("GPU of rank {}, kernels by the code that launched them", read_flame(profile, device=True)),
    ]


def _flame(title: str, frames: Sequence[FlameFrame]) -> Flame:
    total_us = frames[0].us or 1.0
    wide = [each for each in frames if each.us >= NARROWEST * total_us and each.depth < DEEPEST] or [frames[0]]
    widest = sorted(wide, key=lambda each: -each.us)
    least_us = widest[:MOST_FRAMES][-1].us
    shown = [each for each in wide if each.us >= least_us][: 2 * MOST_FRAMES]
    cells = (
        (each.name, spell(each.us), f"{each.us / total_us:.1%}", each.kind, each.calls) for each in widest[:MOST_LISTED]
    )
    listed = table(f"{title}: the widest frames", ("frame", "time>", "share>", "kind", "calls>"), cells)
    placed = (
        {
            "name": each.name,
            "about": f"{spell(each.us)}, {each.us / total_us:.1%}, {each.kind}",
            "kind": each.kind if each.kind in HUES else "other",
            "x": f"{100 * (each.start_us - frames[0].start_us) / total_us:.4g}",
            "width": f"{100 * each.us / total_us:.4g}",
            "row": each.depth,
        }
        for each in shown
    )
    return Flame(title, tuple(placed), max(each.depth for each in shown) + 1, listed)
