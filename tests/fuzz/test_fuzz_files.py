"""Files that somebody has changed: whatever a command reads, it takes or refuses, in a second and in 200 MB.

.venv/bin/pytest tests/fuzz                                some cases of every parser, about 10 s
FUZZ_SEED=7 .venv/bin/pytest tests/fuzz -m soak -s         2,000 of each
"""

import gc
import json
import os
import time
from pathlib import Path

import pytest

from fuzz.engine import Target, fuzz, replay
from fuzz.targets import targets

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("FUZZ_SEED") or time.time() / 86400)  # another one every day, told with what it finds
LEAST, CPU_S = 8, 0.25  # of each parser, whatever the machine


@pytest.fixture
def every(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Target]:
    """All parsers, apart from the settings of who runs the tests."""
    for name in ("MUSTER_SITE", "MUSTER_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return targets(tmp_path)


def test_every_parser_takes_a_whole_file(every: list[Target]) -> None:
    refused = []
    for target in every:
        whole = [*target.seeds, *(path.read_bytes() for path in target.corpus() if path.stem.startswith("seed"))]
        if not any(is_taken(target, data) for data in whole):
            refused.append(target.name)
    assert refused == []


def is_taken(target: Target, data: bytes) -> bool:
    try:
        target.read(data)
    except target.allowed:
        return False
    return True


def test_what_once_failed_is_withstood(every: list[Target]) -> None:
    wrong = {
        f"{each.name}: {path.name}": why for each in every for path in each.corpus() if (why := replay(each, path))
    }
    assert wrong == {}


def test_changed_files_are_taken_or_refused(every: list[Target]) -> None:
    reports = [fuzz(each, seed=SEED, cases=100, cpu_s=CPU_S, least=LEAST) for each in every]
    assert [each.text() for each in reports if each.findings] == []
    assert min(each.cases for each in reports) >= LEAST


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousands_of_changed_files_are_taken_or_refused(every: list[Target]) -> None:
    reports = [fuzz(each, seed=SEED, cases=2000) for each in every]
    print(*(each.text() for each in reports), sep="\n")
    assert [each.text() for each in reports if each.findings] == []


def test_a_reader_is_interrupted_even_if_a_callback_of_the_garbage_collector_takes_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fuzz.engine.MOST_CPU_S", 0.05)

    def spin(phase: str, info: dict[str, int]) -> None:
        end = time.process_time() + 0.2  # longer than the limit, which therefore ends in here
        while time.process_time() < end:
            pass

    def wasteful(data: bytes) -> None:
        while True:
            node: list[object] = []
            node.append(node)

    path = tmp_path / "input.bin"
    path.write_bytes(b"x")
    gc.callbacks.append(spin)
    try:
        why = replay(Target("wasteful", [b"x"], wasteful), path)
    finally:
        gc.callbacks.remove(spin)
    assert why is not None
    assert "over 0.05 s" in why


def test_readers_that_fail_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("CORPUS", tmp_path), ("MOST_CPU_S", 0.02), ("SHRINK_CPU_S", 0.05)):
        monkeypatch.setattr(f"fuzz.engine.{name}", value)

    def frail(data: bytes) -> None:
        size = json.loads(data)["size"]
        while size == 0:
            pass
        bytearray(size)

    target = Target("frail", [b'{"size": 12}'], frail, (ValueError, OverflowError))
    report = fuzz(target, seed=1, cases=2000, most_findings=9)
    kinds = {name for _, name in report.findings}
    assert {"TypeError", "KeyError", "MemoryError", "over 0.02 s"} <= kinds, report.text()
    assert all(replay(target, path) for path in target.corpus())
