"""Timings are read as they were written; what is torn, damaged or somebody else's is told apart."""

import csv
import json

import pytest

from muster.jobs.basics.errors import JobFileError, RunFolderError
from muster.jobs.timing.files import FORMAT, is_timing, read_timings, write_csv, write_timings
from support import measured
from support.timings import end, header, peak, settings, timed, without_times, write_lines


@pytest.fixture
def run(tmp_path):
    """A run folder with one row that has times and one that has not."""
    rows = (timed(), without_times("memory", "needs 38 GB", model="vgg11"))
    write_lines(tmp_path / "run/attempt-000/bench.jsonl", header(settings()), peak(), *rows, end())
    return tmp_path / "run"


def test_a_run_is_read_and_its_json_is_the_same_again(run, tmp_path):
    timings = read_timings([run])
    (timing,) = timings.timings
    assert timing.is_over
    assert [row.state for row in timing.rows] == ["ok", "memory"]
    write_timings(timings, tmp_path / "r.json")
    assert read_timings([tmp_path / "r.json"]) == timings
    assert len(read_timings([run, tmp_path / "r.json"]).timings) == 2


@pytest.mark.parametrize("widths", [[], [1024]], ids=["models", "norms"])
def test_results_of_0_1_0_are_read_unless_they_are_of_norms(widths, tmp_path):
    first, row = header(settings()).model_dump(mode="json"), timed().model_dump(mode="json")
    first["settings"]["widths"] = widths
    row |= {"width": 1024 if widths else None, "moved_bytes": 0, "bytes_per_s": None, "copy_share": None}
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (first, row)))
    if widths:
        with pytest.raises(
            JobFileError, match=r"this is a timing of norms; 0\.1\.0 was the last version with this key"
        ):
            read_timings([tmp_path / "bench.jsonl"])
    else:
        assert read_timings([tmp_path / "bench.jsonl"]).timings[0].rows == [timed()]


def test_rows_become_csv_with_nothing_where_nothing_was_measured(run, tmp_path):
    write_csv(read_timings([run]), tmp_path / "r.csv")
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [(row["model"], row["pass"], row["mean_s"], row["unit"]) for row in rows] == [
        ("gpt-nano", "forward", "0.011", "tokens/s"),
        ("vgg11", "forward", "", "images/s"),
    ]
    assert rows[0]["steps_s"] == "0.011 0.01 0.012"


def test_a_torn_last_line_is_passed_over_and_the_timing_is_not_over(tmp_path):
    path = write_lines(tmp_path / "bench.jsonl", header(settings()), timed())
    with path.open("a") as file:
        file.write('{"record": "timed", "model": "vg')
    (timing,) = read_timings([path]).timings
    assert (len(timing.rows), timing.is_over) == (1, False)
    assert FORMAT.parse(b'{"record": "weather"}') is None
    assert FORMAT.parse(b'{"record": "ti') is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"record": "timing"}\n{"record": "end", "seconds": 1.0, "time": 1.0}\n', "line 1: name: field required"),
        ('{"record": "timing", "version": 9}\n\n', "written as version 9, but this muster reads version 1"),
        ('{"record": "end", "seconds": 1.0, "time": 1.0}\n', "has no measurements"),
        ('{"muster_timing": 1, "timings": []}', "timings: list should have at least 1 item"),
        ("hello", "not JSON"),
    ],
)
def test_what_is_no_timing_is_refused_with_its_place(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(JobFileError, match=message):
        read_timings([tmp_path / "r.json"])


def test_timings_are_told_from_what_collectives_took(run, tmp_path):
    asked = measured.settings(launches=1)
    measured.write_lines(tmp_path / "other/attempt-000/bench.jsonl", measured.result(asked))
    write_timings(read_timings([run]), tmp_path / "r.json")
    (tmp_path / "words.txt").write_text("hello")
    paths = (run, tmp_path / "r.json", tmp_path / "other", tmp_path / "words.txt", tmp_path / "gone")
    assert [is_timing(path) for path in paths] == [True, True, False, False, False]
    with pytest.raises(RunFolderError, match="name a run of muster bench model"):
        read_timings([tmp_path / "gone"])
