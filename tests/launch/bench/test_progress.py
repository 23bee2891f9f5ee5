"""How far a measurement is, as its bench.jsonl grows; and what is shown of it, with a terminal and without."""

import io
import re
from pathlib import Path

from muster.collectives_bench.plan import cells_of, order_of
from muster.collectives_bench.records import BenchCell, Result
from muster.jobs.basics.files import append_line
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.bench import watching as watcher
from muster.launch.bench.live import CollectivesView
from muster.launch.bench.watching import BenchConsole, watching
from support.measured import block, header, pairs, result, settings, world, write_lines


def run_folder(root: Path, measured: Result, *, attempt: int = 0, end: bool = True) -> RunDir:
    run = RunDir(root / "run")
    write_lines(run.attempt(attempt).bench, measured, end=end)
    return run


def rendered(progress: CollectivesView, width: int = 100) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width)
    console.print(progress.table(width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_counts_blocks_and_names_the_cell_that_is_under_way(tmp_path: Path) -> None:
    asked = settings(operation=["all_reduce", "broadcast"], launches=2)
    cells = cells_of(asked, 2)
    order = order_of(cells, 0, asked.seed)
    measured = Result(headers=[header(world(), asked)], blocks=[block(world(), cells[i]) for i in order[:3]])
    progress = CollectivesView(run_folder(tmp_path, measured, end=False))
    assert [type(each).__name__ for each in progress.poll()] == ["BenchHeader", "Block", "Block", "Block"]
    assert (progress.done, progress.total, progress.launch) == (3, 8, 0)
    assert progress.current == cells[order[3]]
    append_line(progress.run.attempt(0).bench, block(world(), cells[order[3]]).model_dump(mode="json"))
    progress.poll()
    assert (progress.launch, progress.current) == (1, cells[order_of(cells, 1, asked.seed)[0]])
    assert progress.poll() == []


def test_before_anything_is_written_there_is_nothing_to_show(tmp_path: Path) -> None:
    progress = CollectivesView(RunDir(tmp_path / "run"))
    assert progress.poll() == []
    (tmp_path / "run" / "attempt-000").mkdir(parents=True)
    assert progress.poll() == []
    assert progress.current is None


def test_a_torn_last_line_and_a_record_of_a_newer_muster_are_passed_over(tmp_path: Path) -> None:
    run = run_folder(tmp_path, result(settings(launches=1)), end=False)
    with run.attempt(0).bench.open("a") as file:
        file.write('{"record": "weather"}\n[]\n{"record": "block", "launch": 0}\n{"record": "bl')
    progress = CollectivesView(run)
    assert len(progress.poll()) == 3
    assert progress.done == 2


def test_a_new_attempt_begins_anew(tmp_path: Path) -> None:
    progress = CollectivesView(run_folder(tmp_path, result()))
    progress.poll()
    assert progress.done == 6
    assert progress.is_over
    run_folder(tmp_path, result(settings(launches=1)), attempt=1, end=False)
    progress.poll()
    assert (progress.done, progress.total, progress.is_over) == (2, 2, False)


def test_the_table_has_a_line_for_each_way_a_column_for_each_size_and_medians(tmp_path: Path) -> None:
    asked = settings(operation=["all_reduce", "reduce", "barrier"], launches=2)
    measured = result(asked)
    failed = BenchCell(operation="reduce", dtype="fp32", asked_bytes=4 << 20, place="in")
    blocks = [
        block(world(), failed, each.launch, state="failed") if each.cell == failed else each for each in measured.blocks
    ]
    progress = CollectivesView(run_folder(tmp_path, measured.model_copy(update={"blocks": blocks[:-1]}), end=False))
    progress.poll()
    text = rendered(progress)
    assert text.startswith("2 nodes x 1 rank, gloo on cpu")
    assert re.search(r"^launch 2 of 2, now .+, 9 of 10 done", text, re.MULTILINE)
    assert re.search(r"median so far +1 MB +4 MB", text)
    assert re.search(r"all_reduce fp32 in +1\.154 ms +4\.3\d\d ms", text)
    assert re.search(r"reduce fp32 in +1\.154 ms +failed", text)
    assert re.search(r"barrier +[\d.]+ us", text)


def test_on_a_narrow_terminal_fewer_sizes_are_shown_the_last_among_them(tmp_path: Path) -> None:
    progress = CollectivesView(run_folder(tmp_path, result(settings(sizes=["1K:1G:4"], launches=1))))
    progress.poll()
    text = rendered(progress, 60)
    assert " 1 KB" in text
    assert " 1 GB" in text
    assert max(map(len, text.splitlines())) <= 60


def test_pairs_are_counted_too(tmp_path: Path) -> None:
    asked = settings(pairs=True, launches=3)
    measured = Result(headers=[header(world(4), asked)], pairs=pairs(4, launches=2))
    progress = CollectivesView(run_folder(tmp_path, measured, end=False))
    progress.poll()
    assert (progress.total, progress.current) == (18, None)
    assert "launch 2 of 3, 12 of 18 done" in rendered(progress)


def test_without_a_terminal_beginning_failures_and_each_launch_are_a_line(tmp_path: Path) -> None:
    measured = result(settings(launches=2))
    cell = measured.blocks[0].cell
    blocks = [block(world(), cell, state="failed", reason="SIGABRT", rank=1), *measured.blocks[1:]]
    progress = CollectivesView(run_folder(tmp_path, measured.model_copy(update={"blocks": blocks})))
    progress.run.attempt(0).bench.touch()
    lines = [line for record in progress.poll() if (line := progress.line_of(record))]
    assert lines[0] == "measuring 2 cells in 2 launches: 2 nodes x 1 rank, gloo on cpu"
    assert re.fullmatch(r"all_reduce \d MB fp32 in: failed in launch 1, rank 1: SIGABRT", lines[1])
    assert lines[2:] == ["launch 1 of 2: 2 cells, 1 not ok", "launch 2 of 2: 2 cells"]


def test_without_a_terminal_pairs_are_a_line_for_each_launch_too(tmp_path: Path) -> None:
    measured = Result(headers=[header(world(3), settings(pairs=True, launches=2))], pairs=pairs(3, launches=2))
    bad = measured.pairs[4].model_copy(update={"state": "timeout", "reason": "no answer within 30 s"})
    made = [*measured.pairs[:4], bad, measured.pairs[5]]
    progress = CollectivesView(run_folder(tmp_path, measured.model_copy(update={"pairs": made})))
    assert [line for record in progress.poll() if (line := progress.line_of(record))] == [
        "measuring pairs in 2 launches: 3 nodes x 1 rank, gloo on cpu",
        "launch 1 of 2: 3 pairs",
        "nodes 0 and 2: timeout: no answer within 30 s",
        "launch 2 of 2: 3 pairs",
    ]


def test_what_is_written_until_the_run_ends_is_shown_though_nobody_looked_again(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(watcher, "POLL_S", 30.0)
    console = BenchConsole()
    with watching(CollectivesView(RunDir(tmp_path / "run")), console):
        run_folder(tmp_path, result(settings(launches=1)))
    assert capsys.readouterr().err.splitlines()[-1] == "launch 1 of 1: 2 cells"


def test_rank_0s_own_table_is_not_shown_but_its_warnings_are(capsys) -> None:
    console = BenchConsole()
    console.lines("out", ["# all_reduce"])
    console.lines("err", ["gloo: careful"])
    console.plan("/runs/demo", [], "127.0.0.1:4242")
    assert capsys.readouterr() == ("", "gloo: careful\nrun /runs/demo\n")
