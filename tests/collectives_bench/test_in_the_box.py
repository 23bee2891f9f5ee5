"""`muster bench` between real network namespaces: slow nodes and pairs are named, and wires are counted to the byte."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.collectives_bench.known import LEAST_JUDGED
from muster.collectives_bench.results.files import read_result
from muster.collectives_bench.results.slow import slow
from support.box import LiveBox

pytestmark = [pytest.mark.command, pytest.mark.cluster]


def bench(folder: Path, *words: str, within: tuple[str, ...] = ()) -> str:
    """Run `muster bench`; its records lie in the file `result.json`."""
    argv = [*within, sys.executable, "-m", "muster", "bench", *words]
    argv += ["--runs", str(folder / "runs"), "--out", str(folder / "result.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=55, check=False)
    assert (folder / "result.json").is_file(), done.stdout + done.stderr
    return done.stdout


def rate(box: LiveBox, *words: str) -> None:
    done = box.command("rate", *words, "--name", box.name)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def shaped(box: LiveBox) -> Iterator[LiveBox]:
    """The box, whose links may be shaped anew; as they were afterwards."""
    rate(box, "1gbit")
    yield box
    rate(box, "1gbit")


@pytest.mark.parametrize(
    ("slower", "named"),
    [
        pytest.param([], [], id="healthy", marks=pytest.mark.soak),
        pytest.param(["750mbit", "--of", "node2"], [("node", (2,), "both")], id="node"),
        pytest.param(
            ["750mbit", "--between", "node0", "node3"], [("link", (0, 3), "both")], id="pair", marks=pytest.mark.soak
        ),
    ],
)
def test_what_is_a_quarter_slower_is_named_and_nobody_else(shaped, tmp_path, slower, named):
    if slower:
        rate(shaped, *slower)
    words = ["--pairs", "--hosts", shaped.spelt, "-N", "4", "--launches", "3"]
    said = bench(tmp_path, *words)
    found = slow(read_result([tmp_path / "result.json"]).pairs)
    assert [(each.kind, each.nodes, each.direction) for each in found.slow] == named, found.lines()
    assert not found.undecided
    assert all(line in said for line in found.lines())


def test_every_operation_moves_the_bytes_of_its_formula_within_1_percent(tmp_path):
    alone = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    words = ["all,ours", "--wire", "-N", "1", "-n", "3", "--sizes", "4M", "--launches", "1", "--block-s", "0.01"]
    bench(tmp_path, *words, within=alone)
    blocks = read_result([tmp_path / "result.json"]).blocks
    judged = [each for each in blocks if each.wire is not None and each.wire.best_bytes >= LEAST_JUDGED]
    assert len(judged) == len(blocks) - 1  # a barrier has no payload
    for each in judged:
        assert each.wire.sent_bytes == pytest.approx(each.wire.known_bytes, rel=0.01), each.cell.operation
