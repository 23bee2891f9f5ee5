"""Timelines of data-parallel steps: recorded on real ranks, read back without trust, drawn on a screen and as plots."""

import json
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import append_line
from muster.jobs.measuring.figures import NothingToPlotError
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.train.timeline import is_kept, step_row
from muster.jobs.world.world import World
from muster.launch import cli
from muster.launch.look.data_steps import OTHER, DataStep, data_step_of
from muster.launch.look.plots.draw import inline_svg
from muster.launch.look.plots.lanes import timeline_plot
from muster.launch.look.timelines import read_timeline, step_of
from support.resuming import GPT, attempt

FACTS = {"mode": "bucketed", "timed_by": "host", "not_timed": ""}
HOUR = 3600.0
PARAMETER_BYTES = 4 * 119_104
OVERLAPPED, LATE = ("overlap", "bucketed"), ("flat", "allreduce", "gather_scatter")
SHARDED = ("zero1", "zero2", "zero3", "fsdp")


def row(step: int = 10, **facts: Any) -> dict[str, Any]:
    """Return a step of two ranks, whose clocks are an hour apart: two buckets, both under way from 6 to 7 s."""
    spans = [
        ("data", 0, None, 1.0, 2.0),
        ("forward", 1, None, 2.0, 4.0),
        ("backward", 2, None, 4.0, 7.0),
        ("communication", 3, None, 7.0, 9.0),
        ("optimizer", 4, None, 9.0, 10.0),
        ("all_reduce", 0, 1 << 20, 5.0, 7.0),
        ("all_reduce", 1, 1 << 21, 6.0, 9.0),
    ]
    later: Any = [(*what, HOUR + start, HOUR + end) for *what, start, end in spans]
    return step_row(step, FACTS, [(spans, [[0.0, 0.0], [HOUR, 0.001]]), (later, [])]) | facts


def run_of(folder: Path, *rows: dict[str, Any]) -> RunDir:
    """Make a run folder with a timeline."""
    run = RunDir(folder / "ddp-20260101T000000.000Z-abcdef")
    run.attempt(0).path.mkdir(parents=True)
    (run.path / "events.jsonl").write_text("")
    for each in rows:
        append_line(run.attempt(0).timeline, each)
    return run


def all_modes(world: World, folder: str) -> list[int]:
    """Train a few steps in every data-parallel mode; two buckets at least where there are buckets."""
    settings = {**GPT, "model": {"name": "gpt-nano", "dropout": 0.1}, "steps": 4, "log_every": 4}
    small = {"bucket_size_mb": 0.1}
    more: dict[str, Any] = {"bucketed": small, "zero1": small, "zero2": small}
    return [
        attempt(world, f"{folder}/{mode}", {**settings, "mode": mode, **more.get(mode, {})})
        for mode in (*OVERLAPPED, *LATE, *SHARDED, "ddp")
    ]


@pytest.mark.ranks
@pytest.mark.slow
def test_real_steps_show_which_modes_communicate_during_the_backward(on_ranks, tmp_path, capsys):
    assert on_ranks(2, all_modes, folder=str(tmp_path)) == [[0] * 10] * 2
    steps: dict[str, DataStep] = {}
    for mode in (*OVERLAPPED, *LATE, *SHARDED, "ddp"):
        timeline = read_timeline(RunDir(tmp_path / mode), None, None)
        assert timeline.steps == (1, 4), "the log points"
        (step,) = timeline.pipelines
        assert isinstance(step, DataStep)
        steps[mode] = step
        assert (step.mode, step.ranks, step.left_out) == (mode, (0, 1), 0)
        for times in step.by_rank():
            assert all(times.phases_s[each] > 0.0 for each in ("data", "forward", "backward", "optimizer"))
            assert (times.collectives > 0) == (mode != "ddp")
        assert all(each.start_s <= each.end_s for each in step.spans)

    for mode in (*OVERLAPPED, *LATE):
        for rank in (0, 1):
            own = [each for each in steps[mode].spans if each.rank == rank]
            backward_s = max(each.end_s for each in own if each.kind == "backward")
            collectives = [each for each in own if each.communicates]
            starts = [each.start_s for each in collectives]
            sent = sum(each.bytes or 0 for each in collectives)
            assert sent == PARAMETER_BYTES, "all gradients, each once"
            assert [each.number for each in sorted(collectives, key=lambda each: each.start_s)] == [*range(len(starts))]
            if mode in OVERLAPPED:
                assert min(starts) < backward_s
            else:
                assert min(starts) >= backward_s
    assert "DistributedDataParallel" in steps["ddp"].not_timed
    assert {each.kind for each in steps["zero2"].spans if each.communicates} >= {"reduce_scatter"}

    plot = timeline_plot({"a": steps["bucketed"], "b": steps["zero3"]})
    assert plot.lanes[:2] == ("a, rank 0: computation", "a, rank 0: communication")
    assert len(plot.lanes) == 8
    assert inline_svg(plot).startswith("<svg")
    (tmp_path / "bucketed" / "events.jsonl").write_text("")
    assert cli.main(["timeline", str(tmp_path / "bucketed")]) == 0
    assert "bucketed, 2 ranks" in capsys.readouterr().out


def test_a_row_is_on_the_first_ranks_clock_and_says_how_far_clocks_may_differ():
    made = row()
    assert made["apart_s"] == 0.001
    assert [each for each in made["records"] if each[1] == "backward"] == [
        [0, "backward", 2, None, 3.0, 6.0],
        [1, "backward", 2, None, 3.0, 6.0],
    ]
    assert made["records"][-1] == [1, "all_reduce", 1, 1 << 21, 5.0, 8.0]


def test_hidden_communication_is_what_passes_while_the_rank_computes():
    step = data_step_of(row())
    assert step is not None
    first, _ = step.by_rank()
    assert (first.collectives, first.bytes) == (2, 3 << 20)
    assert (first.under_way_s, first.hidden_s) == (4.0, 2.0)  # 5 to 9 s, of which the backward has 5 to 7
    assert (step.seconds, first.phases_s["communication"]) == (9.0, 2.0)


def test_it_is_drawn_told_as_data_and_saved(capsys, tmp_path):
    run = run_of(tmp_path, row(5), row(10))
    assert cli.main(["timeline", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("attempt 0, step 10: bucketed, 2 ranks")
    computing, under_way = (line[8:].ljust(112, ".") for line in lines[2:4])
    assert under_way[computing.index("B")] == "."
    assert "2" in under_way[computing.index("B") : computing.index("~")]
    assert cli.main(["timeline", str(run.path), "--step", "5", "--rank", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["recorded"], told["mode"], told["ranks"]) == (5, [5, 10], "bucketed", [0, 1])
    assert told["by_rank"][0]["hidden_s"] == 2.0
    assert cli.main(["timeline", str(run.path), "--svg", str(tmp_path / "step.svg")]) == 0
    assert (tmp_path / "step.svg").read_text().startswith("<?xml")
    assert cli.main(["timeline", str(run.path), "--rank", "2"]) == 72
    capsys.readouterr()


def test_pipelines_and_data_parallel_ranks_stand_above_each_other_and_too_many_are_refused():
    records = [
        [0, "F", 0, 0, 0.0, 1.0],
        [0, "B", 0, 0, 1.0, 3.0],
        [0, "send", 1, 0, 1.0, 1.5],
        [0, "?", 1, 0, 1.0, 1.5],
    ]
    facts = {"schedule": "1f1b", "rank_of": [0], "microbatches": 1, "chunks": 1}
    pipeline, step = step_of({"step": 1, **facts, "records": records}), data_step_of(row())
    assert pipeline is not None
    assert step is not None
    plot = timeline_plot({"pipe": pipeline, "data": step})
    assert plot.lanes[:3] == ("pipe, rank 0: computation", "pipe, rank 0: communication", "data, rank 0: computation")
    assert {each.label for each in plot.series} >= {"forward", "backward", "send", OTHER, "all_reduce"}
    with pytest.raises(NothingToPlotError, match="400 bars are too many"):
        inline_svg(timeline_plot({str(place): step for place in range(100)}))
    with pytest.raises(NothingToPlotError, match="data has no rank 7"):
        timeline_plot({"data": step}, 7)


def test_two_steps_are_plotted_above_each_other(capsys, tmp_path):
    run = run_of(tmp_path, row())
    targets = [f"{run.path}=a", f"{run.path}=b"]
    assert cli.main(["plot", "timeline", *targets, "--output", str(tmp_path / "two.png"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["plot"]
    assert told["lanes"] == [
        f"{label}, rank {rank}: {lane}"
        for label in "ab"
        for rank in (0, 1)
        for lane in ("computation", "communication")
    ]
    series = {each["label"]: each for each in told["series"]}
    assert [*series] == ["data", "forward", "backward", "exposed wait", "optimizer", "all_reduce"]
    assert (series["all_reduce"]["low"][:2], series["all_reduce"]["high"][:2]) == ([4.0, 5.0], [6.0, 8.0])
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["plot", "timeline", *targets, "--rank", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines[:4]] == ["a, rank 1", " " * 9, "b, rank 1", " " * 9]
    assert lines[1].split(" ")[-1].strip(".").strip("1") == lines[3].split(" ")[-1].strip(".").strip("1") != ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": 7},
        {"rank_of": "01"},
        {"rank_of": [[0]]},
        {"records": {}},
        {"records": []},
        {"records": [[0, "all_reduce", 0, 5, 0.0, 1.0]]},  # no phase
        {"records": [[7, "forward", 0, None, 0.0, 1.0]]},  # not one of its ranks
    ],
)
def test_a_row_that_makes_no_step_is_left_out(capsys, tmp_path, wrong):
    run = run_of(tmp_path, row(10), row(11, **wrong))
    assert cli.main(["timeline", str(run.path)]) == 0
    assert "step 10" in capsys.readouterr().out


def test_records_that_cannot_be_are_left_out_and_counted():
    made = row()
    good, wide = len(made["records"]), "x" * 100_000
    made["records"] += [
        [0, "forward", 0, None, 2.0, 1.0],
        [0, "forward", 0, None, float("nan"), 1.0],
        [0, "forward", 0, None, 0.0, 1e300],
        [0, "unheard of", 0, None, 0.0, 1.0],
        [0, "forward", 0, 8, 0.0, 1.0],
        [0, "all_reduce", 0, -1, 0.0, 1.0],
        [0, "all_reduce", 0, "1", 0.0, 1.0],
        [10**30, "forward", 0, None, 0.0, 1.0],
        [0, None, 0, None, 0.0, 1.0],
        [[], {}, 0],
        "forward",
    ]
    step = data_step_of(made)
    assert step is not None
    assert (len(step.spans), step.left_out) == (good, 11)
    made["records"] += [[0, f"\x1b[2J{number}{wide}", number, 8, 0.0, 1.0] for number in range(50)]
    many = data_step_of(made)
    assert many is not None
    kinds = {each.kind for each in many.spans if each.communicates}
    assert OTHER in kinds
    assert max(map(len, kinds)) <= 40
    assert len(kinds) <= 8
    assert "\x1b" not in inline_svg(timeline_plot({"<script>": many}))


def test_log_points_are_recorded_ever_less_often():
    kept = [place for place in range(10_000) if is_kept(place)]
    assert kept[:32] == [*range(32)]
    assert [sum(2**power <= place < 2 ** (power + 1) for place in kept) for power in (5, 6, 12)] == [16, 16, 16]
