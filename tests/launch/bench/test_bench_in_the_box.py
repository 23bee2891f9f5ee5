"""`muster bench` between real hosts: over ssh without shared storage, through Slurm's queue, and pairs of nodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.collectives_bench.records import Result
from support.box import LiveBox

pytestmark = [pytest.mark.command, pytest.mark.cluster, pytest.mark.timeout(180)]

QUICK = ("--launches", "2", "--block-s", "0.02", "--sizes", "8,64K")


def bench(box: LiveBox, runs: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "muster", "bench", *arguments, "--hosts", box.spelt, "--runs", str(runs)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False, env={**os.environ, "CI": ""})


def test_over_ssh_without_shared_storage_records_come_home_as_they_are_made(apart_box: LiveBox, tmp_path) -> None:
    assert apart_box.runs is not None
    done = bench(
        apart_box, apart_box.runs, "all_reduce", *QUICK, "--wire", "-N", "2", "--out", str(tmp_path / "r.json")
    )
    assert done.returncode == 0, done.stderr
    assert "\nlaunch 2 of 2: 2 cells\n" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# bench-all_reduce: 2 nodes x 1 rank, gloo on cpu")
    assert [line.split()[0] for line in lines if not line.startswith("#")] == ["8", "65536", "all_reduce", "all_reduce"]
    assert lines[-1] == "# verdict: OK"
    (header,) = Result.model_validate_json((tmp_path / "r.json").read_text()).headers
    assert len({host.host for host in header.hosts}) == 2


def test_on_slurm_it_is_submitted_followed_and_shown(box: LiveBox, tmp_path) -> None:
    done = bench(box, tmp_path / "runs", "all_reduce,barrier", *QUICK, "--on", "slurm")
    assert done.returncode == 0, done.stderr
    assert "Slurm job " in done.stderr
    assert "#wrong" not in done.stderr
    assert done.stdout.count("# all_reduce: every rank gets the sum of all") == 1
    assert done.stdout.splitlines()[-1] == "# verdict: OK"


def test_pairs_of_all_hosts_are_a_matrix(apart_box: LiveBox) -> None:
    assert apart_box.runs is not None
    done = bench(apart_box, apart_box.runs, "--pairs", "--launches", "1", "--pair-size", "64K")
    assert done.returncode == 0, done.stderr
    assert "\nlaunch 1 of 1: 6 pairs\n" in done.stderr
    lines = done.stdout.splitlines()
    at = lines.index("# bandwidth from the row's node to the column's (GB/s)")
    assert [line.split()[0] for line in lines[at + 2 : at + 6]] == ["0", "1", "2", "3"]
    assert [line.split()[1 + node] for node, line in enumerate(lines[at + 2 : at + 6])] == ["."] * 4
