"""`muster bench norm` as a user calls it."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.timing.files import read_timings
from muster.jobs.timing.settings import TimingSettings
from muster.launch import cli
from support.timings import end, header, norm, write_lines

pytestmark = [pytest.mark.command, pytest.mark.slow]


@pytest.mark.ranks
def test_norms_are_timed_shown_written_and_drawn(tmp_path: Path) -> None:
    out, drawn = tmp_path / "n.json", tmp_path / "n.svg"
    asked = "--norm rms,rms_plain --width 32,50 --rows 8 --precision fp32 --steps 2 --launches 1 --device cpu"
    words = [*asked.split(), "--out", str(out), "--plot", str(drawn), "--runs", str(tmp_path / "runs")]
    argv = [sys.executable, "-m", "muster", "bench", "norm", *words]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=55)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# norm-rms-rms_plain: timings of norms on cpu · torch 2.")
    assert [line.split()[:5] for line in lines if not line.startswith("#")] == [
        [name, str(width), each, "fp32", "8"]
        for width in (32, 50)
        for name, each in (
            ("copy", "forward"),
            *((name, each) for each in ("forward", "backward") for name in ("rms", "rms_plain")),
        )
    ]
    (timing,) = read_timings([out]).timings
    assert all(row.bytes_per_s for row in timing.rows)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "n.csv").read_text())))
    assert {row["width"] for row in rows} == {"32", "50"}
    assert rows[0]["copy_share"] == "1.0"
    assert drawn.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--norm rms_fuse", "--norm: unknown norm 'rms_fuse'; did you mean 'rms_fused'?"),
        ("--width 10,x", "--width: must be a whole number, got 'x'"),
        ("--width 0", "--width: must be at least 1, got 0"),
        ("--rows 0", "--rows: must be at least 1, got 0"),
        ("--pass step", "--pass: unknown pass 'step' (valid: forward, backward)"),
        ("--precision fp8", "--precision: unknown precision 'fp8'"),
        ("--out n.csv", "--out n.csv: must end in .json"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, message, tmp_path, capsys) -> None:
    assert cli.main(["bench", "norm", *arguments.split(), "--runs", str(tmp_path / "runs")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.removeprefix("muster: ").startswith(message)
    assert not (tmp_path / "runs").exists()


def test_two_results_are_compared_by_width_and_drawn_together(tmp_path: Path, capsys) -> None:
    asked = TimingSettings(model=["rms_fused"], widths=[1024, 4096], precision=["bf16"])
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for file in files:
        write_lines(Path(file), header(asked), *(norm(width=width) for width in asked.widths), end())
    assert cli.main(["bench", "compare", *files]) == 0
    said = capsys.readouterr().out
    assert "rms_fused 1024 forward bf16" in said
    assert "rms_fused 4096 forward bf16" in said
    assert cli.main(["bench", "plot", *files, "-o", str(tmp_path / "both.svg")]) == 0
