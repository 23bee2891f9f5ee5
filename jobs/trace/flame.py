"""Flame graphs: from a trace to frames by path, from frames to one SVG that needs no script.

    all ──────────────────────────────────────────────    the recorded steps
    forward ───────────── backward ─────────────────────   phases, in the order of a step
    aten::linear ──────── AddmmBackward0 ───── ...          the widest first

The width of a frame is its time, its title (shown when the pointer rests on it) the name, the time, the share and the
calls. On the host a frame's time is the thread's; where a frame is wider than what lies under it, it did the rest
itself, or waited. On the device it is that of the kernels, under the path that launched them.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

from muster.jobs.trace.events import Event, Step
from muster.jobs.trace.kinds import KINDS, kind_of
from muster.jobs.trace.nesting import Nested, Node
from muster.jobs.trace.operators import kind_on_device, step_at

PHASES: Final = ("data", "forward", "backward", "communication", "optimizer", "replay")
WIDTH: Final = 1200.0
ROW: Final = 18
LETTER: Final = 6.6  # of the text's width, in a font of 11 pixels
MOST_FRAMES: Final = 5000  # in a flame graph's data
NARROWEST: Final = 0.4
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
class Frame:
    """One place in the tree: what ran there, how long and how often."""

    name: str
    kind: str
    value_us: float = 0.0
    calls: int = 0
    children: dict[str, "Frame"] = field(default_factory=dict)

    def child(self, name: str, kind: str) -> "Frame":
        """Return the child of a name, made on demand."""
        return self.children.setdefault(name, Frame(name, kind))

    def add(self, value_us: float) -> None:
        """Count one call."""
        self.value_us += value_us
        self.calls += 1


def host_flame(nested: Nested) -> Frame:
    """Sum up what the host's threads ran, by phase and path."""
    root = Frame("all", "other")
    for step in nested.trace.steps:
        root.add(step.end_us - step.start_us)
        for span in step.spans:
            root.child(span.phase, kind_of(span.phase)).add(span.end_us - span.start_us)
    steps = nested.trace.steps
    places: dict[int, Frame] = {}
    for node in nested.nodes:  # parents come first
        inside = places.get(id(node.parent)) or _phase_frame(root, steps, node.event)
        if inside is not None and not _outlasts_its_phase(steps, node.event):
            frame = inside.child(node.event.name, kind_of(node.event.name))
            frame.add(node.event.duration_us)
            places[id(node)] = frame
    return _widened(root)


def device_flame(nested: Nested) -> Frame:
    """Sum up what ran on the device, by the phase and the path that launched it."""
    root = Frame("all", "other")
    for event, launch in nested.launched():
        frames = [root, *_path_of(root, nested.trace.steps, launch)]
        if len(frames) > 1:
            for frame in (*frames, frames[-1].child(event.name, kind_on_device(event, launch))):
                frame.add(event.duration_us)
    return root


def _path_of(root: Frame, steps: Sequence[Step], launch: Node | None) -> Iterable[Frame]:
    if launch is None:
        return
    frame = _phase_frame(root, steps, launch.event)
    if frame is None:
        return
    yield frame
    for node in launch.path():
        frame = frame.child(node.event.name, kind_of(node.event.name))
        yield frame


def _phase_frame(root: Frame, steps: Sequence[Step], event: Event) -> Frame | None:
    """Return the frame of the phase in which an event began; None between the steps."""
    step = step_at(steps, event.start_us)
    phase = step and step.phase_at(event.start_us)
    return root.child(phase, kind_of(phase)) if phase else None


def _outlasts_its_phase(steps: Sequence[Step], event: Event) -> bool:
    """True for what runs on into another phase, such as Python's call of the whole step: it has no frame of its own."""
    step = step_at(steps, event.start_us)
    return step is None or not any(
        span.start_us <= event.start_us and event.end_us <= span.end_us for span in step.spans
    )


def _widened(frame: Frame) -> Frame:
    """Make every frame at least as wide as its children: on two threads they may take longer than it did."""
    inside_us = sum(_widened(child).value_us for child in frame.children.values())
    frame.value_us = max(frame.value_us, inside_us)
    return frame


def data_of(root: Frame, most: int = MOST_FRAMES) -> dict[str, Any]:
    """Return a flame graph as JSON has it: rows [depth, name, kind, microseconds, calls] in the order of the drawing.

    Of more than `most` frames the widest are kept, so that a frame's parent is there, too.
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
class Box:
    """A frame with its place: pixels from the left, rows from the top."""

    frame: Frame
    left: float
    width: float
    row: int


def render(root: Frame, title: str) -> str:
    """Draw a flame graph as SVG: the same tree gives the same text."""
    boxes = lay_out(root)
    hidden = "" if len(boxes) == count(root) else f"; {count(root) - len(boxes)} frames are too narrow to draw"
    height = ROW * (max(box.row for box in boxes) + 1) + 92
    kinds = [kind for kind in KINDS if any(box.frame.kind == kind for box in boxes)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height}" '
        f'viewBox="0 0 {WIDTH:.0f} {height}" font-family="ui-monospace, monospace" font-size="11">',
        f'<rect width="{WIDTH:.0f}" height="{height}" fill="#fbfbf8"/>',
        f'<text x="12" y="26" font-size="16" font-family="sans-serif">{escape(title)}</text>',
        f'<text x="12" y="46" fill="#555" font-family="sans-serif">{spell(root.value_us)} in all; rest the pointer on '
        f"a frame for its name, time, share and calls{hidden}</text>",
        *_legend(kinds),
        *(line for box in boxes for line in _drawn(box, root.value_us)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def lay_out(root: Frame) -> list[Box]:
    """Place frames from the left, parents above children; those too narrow to see are left out."""
    boxes: list[Box] = []
    todo = [Box(root, 0.0, WIDTH, 0)]
    while todo:
        box = todo.pop()
        boxes.append(box)
        scale = box.width / box.frame.value_us if box.frame.value_us > 0.0 else 0.0
        left, below = box.left, []
        for child in sorted(box.frame.children.values(), key=_order):
            width = child.value_us * scale
            if width >= NARROWEST:
                below.append(Box(child, left, width, box.row + 1))
            left += width
        todo += reversed(below)
    return boxes


def count(frame: Frame) -> int:
    """Count the frames of a tree."""
    return 1 + sum(count(child) for child in frame.children.values())


def spell(value_us: float) -> str:
    """Write a time with three digits and its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value_us >= size:
            return f"{value_us / size:.3g} {unit}" if value_us < 999.5 * size else f"{value_us / size:.0f} {unit}"
    return f"{value_us:.3g} us"


def colour(kind: str, name: str) -> str:
    """Return a colour: the hue is the kind's, the lightness the name's, so that neighbours can be told apart."""
    return f"hsl({HUES[kind]},{20 if kind == 'other' else 62}%,{68 + zlib.crc32(name.encode()) % 14}%)"


def _order(frame: Frame) -> tuple[int, float, str]:
    rank = PHASES.index(frame.name) if frame.name in PHASES else len(PHASES)
    return rank, -frame.value_us, frame.name


def _drawn(box: Box, total_us: float) -> list[str]:
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
