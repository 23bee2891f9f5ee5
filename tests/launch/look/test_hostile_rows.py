"""Run folders whose files say what cannot be: nothing is sized by it, and every command that looks ends well."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import append_line, write_json
from muster.launch import cli
from muster.launch.common import fields, follow
from muster.launch.common.fields import typed
from muster.launch.common.follow import offset_of_last
from muster.launch.records.runrows import read_rows
from muster.launch.records.runstate import read_state
from muster.launch.records.slurm_job import KEPT, SlurmJob
from support.memory import little_memory

pytestmark = [pytest.mark.command, pytest.mark.slow]

HUGE = 3_000_000_000


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"world_size": HUGE, "nodes": -1, "rank": True, "node": 1.5}, {}),
        ({"world_size": 4, "nodes": 2, "rank": 0, "node": None}, {"world_size": 4, "nodes": 2, "rank": 0}),
        ({"time": float("nan"), "started": 1e300, "ended": -1, "seconds": 10**399}, {}),
        ({"host": ["a"], "name": {}, "hosts": "abc", "text": 3}, {}),
        ({"hosts": ["a", 3, None, "b"], "text": "x" * 10_000}, {"hosts": ["a", "b"], "text": "x" * 8192}),
        (
            {"ranks": [[0, 5], [1], 7, [-1, 5], [2, -5], [3, 6, 9]], "pid": 0, "ticks": [[0, 2**40], [1, "x"]]},
            {"ranks": [[0, 5]], "ticks": [[0, 2**40]]},
        ),
        ({"ranks": {"0": 1}, "victims": [1], "first": []}, {"victims": []}),
        ({"first": {"rank": 1, "code": 10**30, "signal": "SIGNOTHING"}}, {"first": {"rank": 1}}),
        ({"signal": "SIGRTMIN+3", "times": {"stop_s": 0.5}}, {"signal": "SIGRTMIN+3", "times": {"stop_s": 0.5}}),
        ({"times": {"stop_s": "long"}, "later": 7, "unknown": [1], "loss": 1e999}, {"later": 7, "loss": 1e999}),
    ],
)  # fmt: skip
def test_values_of_another_type_or_size_are_as_good_as_missing(row: dict[str, Any], found: dict[str, Any]) -> None:
    assert typed(row) == found


def test_a_world_of_3_billion_ranks_takes_no_memory(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run().submitted(world_size=HUGE, nodes=HUGE).event("attempt", attempt=0, world_size=HUGE)
    with little_memory():
        state = read_state(folder.run)
        assert cli.main(["list", "--runs", str(folder.root)]) == 0
        assert cli.main(["status", str(folder.run.path)]) == 0
    assert (state.world_size, state.nodes, state.ranks) == (None, None, ())
    assert "? ranks on ? nodes" in capsys.readouterr().out


def test_the_largest_world_is_listed_and_shown_in_part(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run().submitted(world_size=fields.MOST_RANKS).event("exited", rank=90_000, cause="own", code=3)
    begun = time.process_time()
    assert cli.main(["status", str(folder.run.path)]) == 0
    assert time.process_time() - begun < 10  # generous: it takes one
    *_, heading, first, second = capsys.readouterr().out.splitlines()[:-999]
    assert [heading.split()[0], first.split()[0], second.split()[0]] == ["rank", "90000", "0"]
    assert len(read_state(folder.run).ranks) == fields.MOST_RANKS


def test_rows_without_end_take_little_memory(make_run: Any) -> None:
    folder = make_run().submitted()
    with folder.run.events.open("ab") as file:
        for number in range(30_000):
            rows = [
                {"event": "warning", "text": f"{number} {'x' * 400}"},
                {"event": "started", "node": number % 3, "host": "n", "ranks": [[number % 3, 77]]},
                {"event": "exited", "rank": number % 3, "node": 0, "message": "y" * 400},
            ]
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    rows = read_rows(folder.run)
    assert (len(rows.warnings), len(rows.started), len(rows.exited)) == (1000, 3, 3)
    assert [row["ranks"] for row in rows.started] == [[[0, 77]], [[1, 77]], [[2, 77]]]


def test_the_last_lines_of_a_huge_line_are_sought_for_a_while_only(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow, "MOST_TAIL_BYTES", 1 << 20)
    folder = make_run().submitted(world_size=1, nodes=1).attempt().ended()
    path: Path = folder.run.attempt(0).out(0)
    with path.open("wb") as file:
        file.truncate(10 << 30)  # sparse, and no newline in it
    assert offset_of_last(path, 5) == (10 << 30) - (1 << 20)
    assert cli.main(["logs", str(folder.run.path), "--tail", "5"]) == 0
    assert len(capsys.readouterr().out) < 2 << 20


@pytest.mark.parametrize(
    "record",
    [
        {"job_id": "../../etc/passwd", "name": "x"},
        {"job_id": "12 -x", "name": "x"},
        {"job_id": "12", "name": "x", "cluster": "a --help"},
        {"job_id": ["12"], "name": "x"},
        {},
    ],
)
def test_a_job_of_slurm_has_the_number_of_one(make_run: Any, capsys: pytest.CaptureFixture[str], record: Any) -> None:
    folder = make_run().submitted(host="elsewhere")
    write_json(folder.run.slurm, record)
    assert cli.main(["status", str(folder.run.path)]) == 73
    said = capsys.readouterr().err
    assert said.startswith(f"muster: {folder.run.slurm}: names no Slurm job;")
    assert said.count("\n") == 1


def test_only_what_finds_a_cluster_is_taken_from_a_runs_file(make_run: Any) -> None:
    folder = make_run().submitted()
    environment = {"PATH": "/tmp/evil", "LD_PRELOAD": "/tmp/x.so", "SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": 3}
    write_json(folder.run.slurm, {"job_id": "12_3", "name": "x", "environment": environment})
    job = SlurmJob.read(folder.run)
    assert dict(job.environment) == {"SLURM_CONF": "/etc/slurm.conf"}
    assert set(job.environment) <= set(KEPT)


def test_a_rank_beyond_its_world_has_no_memory_to_show(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run().submitted().attempt()
    first = {"point": "baseline", "rank": 7, "world_size": 4, "attempt": 0, "mode": "ddp", "device": "cpu", "host": "n"}
    for row in (first, {"point": "init", "held": {}}):
        append_line(folder.run.attempt(0).memory(7), row)
    assert cli.main(["memory", str(folder.run.path)]) == 72
    assert "no rank has recorded its memory" in capsys.readouterr().err
