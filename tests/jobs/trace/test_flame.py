"""Flame graphs: the tree of a drawn trace, and an SVG that any XML reader takes."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

from muster.jobs.trace.events import read_trace
from muster.jobs.trace.flame import (
    NARROWEST,
    WIDTH,
    FlameNode,
    colour,
    data_of,
    device_flame,
    host_flame,
    lay_out,
    render,
    spell,
)
from muster.jobs.trace.kinds import KINDS
from muster.jobs.trace.nesting import nest_trace
from support.traces import event, kernels, lane, steps

SVG = "{http://www.w3.org/2000/svg}"


def tree(frame: FlameNode) -> dict:
    return {child.name: (child.value_us, tree(child)) for child in frame.children.values()}


def test_the_host_s_time_by_phase_and_path_over_all_threads() -> None:
    made = [
        *steps("fffbbbo"),
        *lane("cpu_op", "aten::linear", "##....."),
        *lane("cpu_op", "aten::mm", ".#....."),
        *lane("cpu_op", "MmBackward0", "...##..", 7),
        *lane("user_annotation", "gloo:all_reduce", "...####", 9),  # nobody's time on the host
    ]
    root = host_flame(nest_trace(read_trace(made)))
    assert tree(root) == {
        "forward": (30.0, {"aten::linear": (20.0, {"aten::mm": (10.0, {})})}),
        "backward": (30.0, {"MmBackward0": (20.0, {})}),
        "optimizer": (10.0, {}),
    }
    assert root.value_us == 70.0


def test_what_outlasts_its_phase_gives_way_to_what_it_called() -> None:
    made = [
        *steps("ffbb"),
        event("python_function", "engine.py(80): train_step", -5.0, 40.0),
        event("python_function", "engine.py(90): shard", 1.0, 39.0),
        *lane("cpu_op", "aten::mm", "#.#."),
    ]
    root = host_flame(nest_trace(read_trace(made)))
    assert tree(root) == {
        "forward": (20.0, {"aten::mm": (10.0, {})}),
        "backward": (20.0, {"aten::mm": (10.0, {})}),
    }


def test_a_frame_is_as_wide_as_what_two_threads_ran_in_it() -> None:
    made = [*steps("ff"), *lane("cpu_op", "a", "##", 1), *lane("cpu_op", "b", "##", 2)]
    assert host_flame(nest_trace(read_trace(made))).children["forward"].value_us == 40.0


def test_the_device_s_time_lies_under_the_path_that_launched_it() -> None:
    made = [
        *steps("ffff"),
        *lane("cpu_op", "aten::mm", "##.."),
        *kernels("gemm", "..#....", "x...", stream=7, first=1),
        *kernels("relu", ".......#", "..x.", stream=7, first=5),
    ]
    root = device_flame(nest_trace(read_trace(made)))
    assert tree(root) == {
        "forward": (
            20.0,
            {
                "aten::mm": (10.0, {"cudaLaunchKernel": (10.0, {"gemm": (10.0, {})})}),
                "cudaLaunchKernel": (10.0, {"relu": (10.0, {})}),
            },
        )
    }


def test_the_svg_is_xml_with_a_title_for_every_frame_and_the_same_every_time() -> None:
    names = ['void at::native::kernel<float, 4>(int&, "x")', "aten::mm", "<built-in method>"]
    operators = [event("cpu_op", name, at * 10.0, at * 10.0 + 9.0) for at, name in enumerate(names)]

    def drawn(events: list) -> str:
        return render(host_flame(nest_trace(read_trace([*steps("ffff"), *events]))), "rank 0 & <all>")

    text = drawn(operators)
    assert text == drawn(operators[::-1])
    found = ElementTree.fromstring(text)
    titles = [each.text for each in found.iter(f"{SVG}title")]
    assert len(titles) == 2 + len(names)
    assert all(any(str(title).startswith(name) for title in titles) for name in names)
    assert "22.5%" in next(str(title) for title in titles if "aten::mm" in str(title))
    assert "script" not in text


def test_children_lie_within_their_parent_and_the_narrow_are_counted_not_drawn() -> None:
    root = FlameNode("all", "other", 1e6, 1)
    for number in range(3):
        root.child(f"wide {number}", "other").add(3e5)
    root.child("narrow", "other").add(1e6 * NARROWEST / WIDTH / 2)
    boxes = lay_out(root)
    assert [box.frame.name for box in boxes] == ["all", "wide 0", "wide 1", "wide 2"]
    lefts = [(box.left, box.left + box.width) for box in boxes[1:]]
    assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(lefts))
    assert lefts[-1][1] <= WIDTH
    assert "1 frames are too narrow" in render(root, "t")


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert len({colour(kind, "name") for kind in KINDS}) == len(KINDS)


def test_times_are_spelt_with_three_digits() -> None:
    assert [spell(each) for each in (0.5, 12.34, 999.0, 1234.0, 12.3e6)] == [
        "0.5 us",
        "12.3 us",
        "999 us",
        "1.23 ms",
        "12.3 s",
    ]


def test_as_data_it_has_the_frames_in_the_order_of_the_drawing_and_the_widest_of_too_many() -> None:
    root = FlameNode("all", "other", 100.0, 1)
    for place, name in enumerate(("backward", "forward")):
        phase = root.child(name, "other")
        phase.add(50.0)
        phase.child("<script>", "matmul").add(40.0 - place)
    rows = [
        [0, "all", "other", 100.0, 1],
        [1, "forward", "other", 50.0, 1],
        [2, "<script>", "matmul", 39.0, 1],
        [1, "backward", "other", 50.0, 1],
        [2, "<script>", "matmul", 40.0, 1],
    ]
    assert data_of(root) == {"version": 1, "frames": rows, "left_out": 0}
    assert data_of(root, most=4) == {"version": 1, "frames": [*rows[:2], *rows[3:]], "left_out": 1}
