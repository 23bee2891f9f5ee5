"""What ranks print, read from their logs: of rank 0, or of all; of attempt after attempt."""

from pathlib import Path

import pytest

from muster.jobs.basics.files import append_line
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.scheduler.rank_outputs import RunOutput
from muster.launch.supervision.console import Console


def write(run: RunDir, attempt: int, rank: int, text: str, stream: str = "out") -> None:
    folder = run.attempt(attempt)
    folder.path.mkdir(exist_ok=True)
    with getattr(folder, stream)(rank).open("a") as file:
        file.write(text)


def begin(run: RunDir, attempt: int) -> None:
    append_line(run.events, {"event": "attempt", "attempt": attempt, "world_size": 1})


@pytest.mark.parametrize(
    ("tee", "expected"),
    [
        (False, "one\nend\n"),
        (True, "[rank 0] one\n[rank 12] two\n[rank 3] late\n[rank 0] end\n"),
    ],
)
def test_lines_come_as_ranks_begin_to_write(tmp_path: Path, capsys, tee: bool, expected: str) -> None:
    run = RunDir(tmp_path)
    outputs = RunOutput(run, Console(tee=tee), offset=0, on_row=lambda row: None)
    outputs.read()
    begin(run, 0)
    outputs.read()
    write(run, 0, 0, "one\n")
    write(run, 0, 12, "two\nhal")
    outputs.read()
    write(run, 0, 3, "late\n")
    outputs.read()
    write(run, 0, 0, "end")
    outputs.read()
    capsys_before_the_end = capsys.readouterr().out
    begin(run, 1)
    outputs.read()
    shown = capsys_before_the_end + capsys.readouterr().out
    assert shown.replace("[rank 12] hal\n", "") == expected


def test_of_attempts_that_were_there_nothing_is_shown(tmp_path: Path, capsys) -> None:
    run = RunDir(tmp_path)
    write(run, 0, 0, "before\n")
    begin(run, 0)
    outputs = RunOutput(run, Console(), offset=run.events.stat().st_size, on_row=lambda row: None)
    outputs.read()
    begin(run, 1)
    write(run, 1, 0, "after\n")
    outputs.read()
    outputs.pass_on(last=True)
    assert capsys.readouterr().out == "after\n"
