"""Run folders of earlier versions, kept as they were written: every command reads them to the end.

`golden/VERSION.tar.xz` has small runs (one-layer GPT, a linear layer in a session) that this version wrote: plain, over
ssh, in Slurm, in place with a killed rank, ZeRO 3, a pipeline, a sweep, a session, a benchmark with the cluster profile
fitted to it, and mode `asynchronous` with a lost rank; and the job files. A new version adds a file and changes none.
"""

import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

pytestmark = pytest.mark.command

GOLDEN = Path(__file__).parent / "golden"
ENDS = {  # a part of the run's name: what `muster why` says of its end
    "asynchronous-": "3 ranks ended with 0, without rank 3 on node 3 (vm)",
    "bench-": "2 ranks ended with 0",
    "in-place-": "total    3 attempts, 1 failed, 10 steps and 4.4 s lost, 24.6 s in all",
    "over-ssh-": "2 ranks ended with 0",
    "pipeline-": "2 ranks ended with 0",
    "plain-2": "2 ranks ended with 0",
    "queued-": "2 ranks ended with 0",
    "session-": "1 rank ended with 0",
    "sweep-plain-": "2 done",
    "zero-": "2 ranks ended with 0",
}
Muster = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", params=sorted(path.name for path in GOLDEN.iterdir()))
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one version."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def golden(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that the test may change; its runs are those of every command."""
    folder = copytree(unpacked, tmp_path / "golden")
    monkeypatch.setenv("MUSTER_RUNS", str(folder / "runs"))
    return folder


def test_status_and_why_read_every_run(golden: Path, in_process: Muster) -> None:
    assert len(ENDS) + 2 == len(list((golden / "runs").iterdir()))  # the sweep's two runs
    for name, end in ENDS.items():
        code, text, said = in_process("why", name)
        assert (code, said) == (0, ""), name
        assert end in text
        code, text, said = in_process("status", name)
        assert (code, said) == (0, ""), name
        assert "done" in text


@pytest.mark.slow
def test_compare_and_report_read_every_training(golden: Path, in_process: Muster) -> None:
    trainings = sorted(set(ENDS) - {"bench-", "session-", "sweep-plain-"})
    code, text, said = in_process("compare", *trainings)
    assert (code, said) == (0, "")
    assert all(each.rstrip("2") in text for each in trainings)
    page = golden / "page.html"
    assert in_process("report", *trainings, "--output", str(page))[0] == 0
    assert all(each.rstrip("2") in page.read_text() for each in trainings)
    assert in_process("compare", "sweep-plain-")[0] == 0


def test_bench_show_and_predict_read_the_results_and_the_profile(golden: Path, in_process: Muster) -> None:
    code, text, _ = in_process("bench", "show", "bench-")
    assert code == 0
    assert "all_gather" in text
    profile = str(golden / "profile.json")
    for job in ("plain", "zero", "pipeline"):
        assert in_process("predict", str(golden / f"{job}.yaml"), "--profile", profile)[0] == 0, job


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "steps"), [("plain-2", 14), ("zero-", 14), ("pipeline-", 14), ("in-place-", 402)])
def test_resume_continues_from_the_checkpoint(golden: Path, in_process: Muster, name: str, steps: int) -> None:
    more = ("--set", f"train.steps={steps}", "--set", f"python={sys.executable}", "--set", f"workdir={golden}")
    code, text, said = in_process("resume", name, *more)
    assert code == 0, said
    assert f"step {steps}/{steps}" in text + said
