"""Results as files: what is written is read back, and whatever else lies there is one clear error."""

import contextlib
import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.collectives_bench.records import BenchHeader, Block, Result
from muster.collectives_bench.results.causes import findings
from muster.collectives_bench.results.files import COLUMNS, read_result, write_csv, write_result
from muster.collectives_bench.results.rows import rows_of
from muster.jobs.basics.errors import JobFileError, MusterError, RunFolderError, StorageError
from muster.jobs.measuring.compare import comparison
from muster.jobs.measuring.recorded import End
from muster.jobs.runfolder.rundir import RunDir
from support.bench_records import a_block, a_cell, a_header, a_world

BLOCKS = [a_block(launch=launch, lateness=[0.9, 1.0], foreign=0.01) for launch in range(3)]
RESULT = Result(headers=[a_header()], blocks=BLOCKS)


def lines_of(*records: BenchHeader | Block | End) -> str:
    """Spell records as a job writes them."""
    return "".join(record.model_dump_json() + "\n" for record in records)


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """Return the file of a run that ended."""
    path = tmp_path / "bench.jsonl"
    path.write_text(lines_of(a_header(), *BLOCKS, End(seconds=1.0, time=2000.0)))
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_result(RESULT, tmp_path / "result.json")
    assert read_result([tmp_path / "result.json"]) == RESULT
    assert json.loads((tmp_path / "result.json").read_text())["muster_bench"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_an_empty_part_is_written_and_read_as_well(tmp_path: Path) -> None:
    write_result(Result(headers=[a_header()]), tmp_path / "result.json")
    assert read_result([tmp_path / "result.json"]) == Result(headers=[a_header()])


def test_records_of_a_job_are_read_and_its_last_line_is_none_of_them(bench: Path) -> None:
    assert read_result([bench]) == RESULT


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_torn_last_line_is_dropped(bench: Path, cut: int) -> None:
    whole = lines_of(a_header(), *BLOCKS)
    bench.write_text(whole[:-cut])
    read = read_result([bench])
    assert read.headers == RESULT.headers
    assert read.blocks == (BLOCKS if cut == 1 else BLOCKS[:2])  # without its end of line it is whole all the same


def test_a_run_still_at_its_first_line_holds_nothing_yet(bench: Path) -> None:
    bench.write_text(lines_of(a_header())[:40])
    with pytest.raises(JobFileError, match=r"bench\.jsonl: "):
        read_result([bench])


def test_the_newest_attempt_that_measured_is_read_of_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for attempt, blocks in ((0, BLOCKS[:1]), (1, BLOCKS[:2])):
        run.attempt(attempt).path.mkdir()
        run.attempt(attempt).bench.write_text(lines_of(a_header(), *blocks))
    run.attempt(2).path.mkdir()  # begun, and ended before it measured
    assert read_result([tmp_path]).blocks == BLOCKS[:2]
    assert read_result([run.attempt(0).path]).blocks == BLOCKS[:1]


def test_several_results_become_one_and_what_two_hold_is_taken_once(bench: Path, tmp_path: Path) -> None:
    other = Result(headers=[a_header(world=a_world(4))], blocks=[*BLOCKS[1:], a_block(world=a_world(4))])
    write_result(other, tmp_path / "other.json")
    read = read_result([bench, tmp_path / "other.json", bench])
    assert len(read.headers) == 2
    assert read.blocks == [*BLOCKS, a_block(world=a_world(4))]


BAD: dict[str, tuple[str, str]] = {
    "nothing": ("", "not JSON"),
    "text": ("hello\nworld\n", "not JSON"),
    "another list": ("[1, 2]", "not a result of muster bench"),
    "another object": ('{"a": 1}\n', "line 1: not a record"),
    "no records": ('{"muster_bench": 1}', "contains no records"),
    "another version": ('{"muster_bench": 2, "rows": []}', "written as version 2"),
    "another version's header": ('{"record": "header", "version": 7}\n', "written as version 7"),
    "unhashable record": ('{"record": ["header"]}\n{}\n', "line 1: not a record"),
    "endless depth": ("[" * 100_000, "not JSON"),
    "bytes": ("\udcff\udcfe", "not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_result_is_one_clear_error(tmp_path: Path, name: str) -> None:
    text, expected = BAD[name]
    path = tmp_path / "file.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(JobFileError, match=expected) as caught:
        read_result([path])
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def changed(**fields: object) -> str:
    """Spell a block with some fields changed, between two good lines."""
    bad = {**json.loads(BLOCKS[1].model_dump_json()), **fields}
    return lines_of(a_header()) + json.dumps(bad) + "\n" + lines_of(BLOCKS[2])


WORLD = json.loads(a_world().model_dump_json())
CELL = json.loads(a_cell().model_dump_json())
TIMING = json.loads(BLOCKS[0].model_dump_json())["latency"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"launch": "first"}, "line 2: launch: input should be a valid integer, got 'first'"),
        ({"surprise": 1}, "line 2: surprise: extra inputs"),
        ({"state": "fine"}, "line 2: state: "),
        ({"samples_us": [1.0, float("nan")]}, "line 2: "),
        ({"latency": {**TIMING, "n": 0}}, "line 2: latency.n: input should be greater than or equal to 1, got 0"),
        ({"latency": {**TIMING, "min_us": 1e9}}, "line 2: latency: value error, inconsistent times"),
        ({"samples_us": [-1.0]}, "line 2: samples_us.0: input should be greater than or equal to 0, got -1.0"),
        ({"world": {**WORLD, "ranks": 0}}, "line 2: world.ranks: input should be greater than or equal to 1, got 0"),
        ({"cell": {**CELL, "operation": "all_redcue"}}, "unknown operation 'all_redcue'; did you mean 'all_reduce'"),
        ({"cell": {**CELL, "dtype": "fp8"}}, "unknown dtype 'fp8'"),
    ],
)
def test_a_damaged_record_is_named_by_line_and_field(bench: Path, fields: dict[str, object], expected: str) -> None:
    bench.write_text(changed(**fields))
    with pytest.raises(JobFileError) as caught:
        read_result([bench])
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"{bench}: ")


def test_a_torn_line_among_whole_ones_is_an_error_that_names_it(bench: Path) -> None:
    header, first, second = lines_of(a_header(), *BLOCKS[:2]).splitlines()
    bench.write_text(f"{header}\n{first[:50]}{second}\n{second}\n")
    with pytest.raises(JobFileError, match="line 2: not JSON"):
        read_result([bench])


@given(position=st.integers(0, 3000), byte=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
def test_any_byte_may_be_wrong_and_it_is_a_result_or_an_error_of_ours(bench: Path, position: int, byte: int) -> None:
    data = bytearray(lines_of(a_header(), *BLOCKS).encode())
    data[position % len(data)] = byte
    bench.write_bytes(bytes(data))
    with contextlib.suppress(MusterError):
        result = read_result([bench])
        rows = rows_of(result)
        findings(result)
        if rows:
            comparison(rows, rows)


def test_a_file_that_is_not_there_and_a_run_that_measured_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"gone\.json: No such file"):
        read_result([tmp_path / "gone.json"])
    with pytest.raises(RunFolderError, match=r"nothing was measured here"):
        read_result([tmp_path])


@pytest.mark.parametrize("write", [lambda path: write_result(RESULT, path), lambda path: write_csv([], path)])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(RunFolderError, match="there is no folder"):
        write(tmp_path / "none" / "result")
    (tmp_path / "folder").mkdir()
    with pytest.raises((RunFolderError, StorageError), match="folder"):
        write(tmp_path / "folder")


def test_csv_has_a_line_for_each_row_and_nothing_for_what_was_not_measured(tmp_path: Path) -> None:
    failed = a_block(None, cell=a_cell("broadcast"), state="failed", reason='rank 1, "the second", died\nof it')
    write_csv(rows_of(Result(blocks=[*BLOCKS, failed])), tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        names, good, bad = list(csv.reader(file))
    assert names == list(COLUMNS)
    row, other = dict(zip(names, good, strict=True)), dict(zip(names, bad, strict=True))
    assert (row["operation"], row["nbytes"], row["state"]) == ("all_reduce", str(2**20), "ok")
    assert float(row["p50_us"]) == 103.0
    assert float(row["busbw_gb_s"]) == pytest.approx(2**20 / 103.0 / 1e3)
    assert (other["p50_us"], other["reason"]) == ("", 'rank 1, "the second", died\nof it')
