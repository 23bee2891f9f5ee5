"""Flame graphs: sum the events of a trace by call path, and draw the result as an SVG without scripts.

    all ──────────────────────────────────────────────    the recorded steps
    forward ───────────── backward ─────────────────────   phases, in the order of a step
    aten::linear ──────── AddmmBackward0 ───── ...          the widest first

The width of a frame is its time. Its tooltip shows the name, the time, the share and the number of calls. On the host,
the time is that of the thread. The part of a frame that its children do not cover is its own work, or waiting. On the
device, the time is that of the kernels, and the path is that of their launches.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

from muster.jobs.trace.events import Event, ProfiledStep
from muster.jobs.trace.kinds import KINDS, kind_of
from muster.jobs.trace.nesting import Nested, NestedEvent
from muster.jobs.trace.operators import kind_on_device, step_at

PHASES: Final = ("data", "forward", "backward", "communication", "optimizer", "replay")
WIDTH: Final = 1200.0
ROW: Final = 18
LETTER: Final = 6.6  # width of a letter in pixels, at a font size of 11 pixels
MOST_FRAMES: Final = 5000  # limit for the data of a flame graph
NARROWEST: Final = 0.4  # pixels
HUES: Final = {
    "communication": 355,
    "attention": 285,
    "convolution": 205,
    "matmul": 220,
    "optimizer": 130,
    "memory": 175,
    "compiled": 90,
    "normalization": 320,
    "softmax": 260,
    "pooling": 190,
    "elementwise": 70,
    "launch": 50,
    "python": 40,
    "autograd": 28,
    "other": 18,
}


@dataclass
class FlameNode:
    """One frame: the name and kind of its events, their total time, and their number."""

    name: str
    kind: str
    value_us: float = 0.0
    calls: int = 0
    children: dict[str, "FlameNode"] = field(default_factory=dict)

    def child(self, name: str, kind: str) -> "FlameNode":
        """Return the child with this name; create it if there is none."""
        return self.children.setdefault(name, FlameNode(name, kind))

    def add(self, value_us: float) -> None:
        """Add one call of this duration."""
        self.value_us += value_us
        self.calls += 1


def host_flame(nested: Nested) -> FlameNode:
    """Sum up the time of the host's threads by phase and call path."""
    root = FlameNode("all", "other")
    for step in nested.trace.steps:
        root.add(step.end_us - step.start_us)
        for span in step.spans:
            root.child(span.phase, kind_of(span.phase)).add(span.end_us - span.start_us)
    steps = nested.trace.steps
    places: dict[int, FlameNode] = {}
    for node in nested.nodes:  # parents come first
        inside = places.get(id(node.parent)) or _phase_frame(root, steps, node.event)
        if inside is not None and not _outlasts_its_phase(steps, node.event):
            frame = inside.child(node.event.name, kind_of(node.event.name))
            frame.add(node.event.duration_us)
            places[id(node)] = frame
    return _widened(root)


def device_flame(nested: Nested) -> FlameNode:
    """Sum up the time of device events by the phase and call path that launched them."""
    root = FlameNode("all", "other")
    for event, launch in nested.launched():
        frames = [root, *_path_of(root, nested.trace.steps, launch)]
        if len(frames) > 1:
            for frame in (*frames, frames[-1].child(event.name, kind_on_device(event, launch))):
                frame.add(event.duration_us)
    return root


def _path_of(root: FlameNode, steps: Sequence[ProfiledStep], launch: NestedEvent | None) -> Iterable[FlameNode]:
    if launch is None:
        return
    frame = _phase_frame(root, steps, launch.event)
    if frame is None:
        return
    yield frame
    for node in launch.path():
        frame = frame.child(node.event.name, kind_of(node.event.name))
        yield frame


def _phase_frame(root: FlameNode, steps: Sequence[ProfiledStep], event: Event) -> FlameNode | None:
    """Return the frame of the phase in which an event began, or None if it began outside the recorded steps."""
    step = step_at(steps, event.start_us)
    phase = step and step.phase_at(event.start_us)
    return root.child(phase, kind_of(phase)) if phase else None


def _outlasts_its_phase(steps: Sequence[ProfiledStep], event: Event) -> bool:
    """Return True if an event ends after its phase, such as the Python call of a whole step. It then gets no frame."""
    step = step_at(steps, event.start_us)
    return step is None or not any(
        span.start_us <= event.start_us and event.end_us <= span.end_us for span in step.spans
    )


def _widened(frame: FlameNode) -> FlameNode:
    """Make every frame at least as wide as the sum of its children, which ran in parallel if they are wider."""
    inside_us = sum(_widened(child).value_us for child in frame.children.values())
    frame.value_us = max(frame.value_us, inside_us)
    return frame


def data_of(root: FlameNode, most: int = MOST_FRAMES) -> dict[str, Any]:
    """Return a flame graph for JSON: rows [depth, name, kind, microseconds, calls] in the order of the drawing.

    If there are more than `most` frames, only the widest are kept. The parent of a frame is at least as wide, so it is
    kept, too.
    """
    every = [(0, root)]
    at = 0
    while at < len(every):  # parents come before their children
        depth, frame = every[at]
        every += ((depth + 1, child) for child in frame.children.values())
        at += 1
    widest = sorted(every, key=lambda each: (-each[1].value_us, each[0]))
    kept = {id(frame) for _, frame in widest[:most]}
    rows, todo = [], [(0, root)]
    while todo:
        depth, frame = todo.pop()
        rows.append([depth, frame.name, frame.kind, round(frame.value_us, 3), frame.calls])
        below = sorted((child for child in frame.children.values() if id(child) in kept), key=_order, reverse=True)
        todo += ((depth + 1, child) for child in below)
    return {"version": 1, "frames": rows, "left_out": len(every) - len(rows)}


# Drawing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlameBox:
    """A frame with its position: pixels from the left, rows from the top."""

    frame: FlameNode
    left: float
    width: float
    row: int


def render(root: FlameNode, title: str) -> str:
    """Draw a flame graph as SVG. The output depends only on the arguments."""
    boxes = lay_out(root)
    hidden = "" if len(boxes) == count(root) else f"; {count(root) - len(boxes)} frames are too narrow to draw"
    height = ROW * (max(box.row for box in boxes) + 1) + 92
    kinds = [kind for kind in KINDS if any(box.frame.kind == kind for box in boxes)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height}" '
        f'viewBox="0 0 {WIDTH:.0f} {height}" font-family="ui-monospace, monospace" font-size="11">',
        f'<rect width="{WIDTH:.0f}" height="{height}" fill="#fbfbf8"/>',
        f'<text x="12" y="26" font-size="16" font-family="sans-serif">{escape(title)}</text>',
        f'<text x="12" y="46" fill="#555" font-family="sans-serif">{spell(root.value_us)} in total; hover over a '
        f"frame to see its name, time, share and calls{hidden}</text>",
        *_legend(kinds),
        *(line for box in boxes for line in _drawn(box, root.value_us)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def lay_out(root: FlameNode) -> list[FlameBox]:
    """Place frames from left to right, parents above children. Frames that are too narrow to see are left out."""
    boxes: list[FlameBox] = []
    todo = [FlameBox(root, 0.0, WIDTH, 0)]
    while todo:
        box = todo.pop()
        boxes.append(box)
        scale = box.width / box.frame.value_us if box.frame.value_us > 0.0 else 0.0
        left, below = box.left, []
        for child in sorted(box.frame.children.values(), key=_order):
            width = child.value_us * scale
            if width >= NARROWEST:
                below.append(FlameBox(child, left, width, box.row + 1))
            left += width
        todo += reversed(below)
    return boxes


def count(frame: FlameNode) -> int:
    """Count the frames of a tree."""
    return 1 + sum(count(child) for child in frame.children.values())


def spell(value_us: float) -> str:
    """Format a time with three digits and a unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value_us >= size:
            return f"{value_us / size:.3g} {unit}" if value_us < 999.5 * size else f"{value_us / size:.0f} {unit}"
    return f"{value_us:.3g} us"


def colour(kind: str, name: str) -> str:
    """Return a colour with a hue for the kind, and a lightness that depends on the name, to distinguish neighbours."""
    return f"hsl({HUES[kind]},{20 if kind == 'other' else 62}%,{68 + zlib.crc32(name.encode()) % 14}%)"


def _order(frame: FlameNode) -> tuple[int, float, str]:
    rank = PHASES.index(frame.name) if frame.name in PHASES else len(PHASES)
    return rank, -frame.value_us, frame.name


def _drawn(box: FlameBox, total_us: float) -> list[str]:
    frame, top = box.frame, 80 + box.row * ROW
    share = frame.value_us / total_us if total_us > 0.0 else 0.0
    calls = f", {frame.calls} call{'s' * (frame.calls != 1)}" if frame.calls else ""
    lines = [
        f"<g><title>{escape(frame.name)}: {spell(frame.value_us)}, {share:.1%}{calls}; {frame.kind}</title>",
        f'<rect x="{box.left:.2f}" y="{top}" width="{max(box.width - 0.5, 0.2):.2f}" height="{ROW - 1}" '
        f"fill={quoteattr(colour(frame.kind, frame.name))}/>",
    ]
    letters = int((box.width - 6) / LETTER)
    if letters >= 3:
        text = frame.name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("aten::")
        text = text if len(text) <= letters else text[: letters - 2] + ".."
        lines.append(f'<text x="{box.left + 3:.2f}" y="{top + 13}">{escape(text)}</text>')
    return [*lines, "</g>"]


def _legend(kinds: Sequence[str]) -> list[str]:
    lines, left = [], 12.0
    for kind in kinds:
        lines.append(f'<rect x="{left:.0f}" y="56" width="11" height="11" fill={quoteattr(colour(kind, ""))}/>')
        lines.append(f'<text x="{left + 15:.0f}" y="66">{kind}</text>')
        left += 15 + LETTER * (len(kind) + 3)
    return lines
