"""Run folders of earlier versions, kept as they were written: every command reads them to the end.

`golden/VERSION.tar.xz` has small runs (one-layer GPT, a linear layer in a session) that this version wrote: plain, over
ssh, in Slurm, in place with a killed rank, ZeRO 3, a pipeline, a sweep, a session, a benchmark with the cluster profile
fitted to it, and mode `asynchronous` with a lost rank; and the job files. A new version adds a file and changes none.
"""

import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from muster.jobs.basics import exits

pytestmark = [pytest.mark.command, pytest.mark.usefixtures("forked_ranks")]

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
TRAININGS = ENDS.keys() - {"bench-", "session-", "sweep-plain-"}
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


def test_watch_logs_and_timeline_read_every_run(golden: Path, in_process: Muster) -> None:
    last = {"bench-": "all_gather", "asynchronous-": "step 1200/1200", "in-place-": "step 400/400"}
    for name in ENDS.keys() - {"sweep-plain-"}:
        code, text, said = in_process("watch", name)
        assert (code, said) == (0, ""), name
        assert "done" in text
        code, text, said = in_process("logs", name)
        assert (code, said) == (0, ""), name
        assert last.get(name, "step 12/12") in text
    for name in TRAININGS - {"asynchronous-"}:  # its ranks have no common steps, so no timeline is recorded
        code, text, said = in_process("timeline", name)
        assert (code, said) == (0, ""), name
        assert "backward" in text


@pytest.mark.slow
def test_compare_and_report_read_every_run(golden: Path, in_process: Muster) -> None:
    code, text, said = in_process("compare", *sorted(TRAININGS))
    assert (code, said) == (0, "")
    assert all(each.rstrip("2") in text for each in TRAININGS)
    code, text, said = in_process("compare", "sweep-plain-")
    assert (code, said) == (0, "")
    assert "allreduce" in text
    assert "zero1" in text
    page = golden / "page.html"
    assert in_process("report", *sorted(ENDS), "--output", str(page))[0] == 0
    written = page.read_text()
    assert all(each.rstrip("2") in written for each in ENDS.keys() - {"sweep-plain-"})
    assert "plain-mode-zero1-" in written


def test_bench_show_and_predict_read_the_results_and_the_profile(golden: Path, in_process: Muster) -> None:
    code, text, _ = in_process("bench", "show", "bench-")
    assert code == 0
    assert "all_gather" in text
    profile = str(golden / "profile.json")
    for job in ("plain", "over-ssh", "queued", "in-place", "zero", "pipeline"):
        code, text, _ = in_process("predict", str(golden / f"{job}.yaml"), "--profile", profile)
        assert code == 0, job
        assert "0.00645 million parameters" in text or job == "pipeline"


def test_a_run_whose_ranks_did_not_step_together_is_read_to_its_end(golden: Path, in_process: Muster) -> None:
    code, text, _ = in_process("compare", "asynchronous-", "--json")
    (row,) = json.loads(text)["rows"]
    assert (code, row["mode"], row["steps"] + row["skipped"]) == (0, "asynchronous", 1200)
    assert row["final_loss"] == pytest.approx(3.5345, abs=1e-4)
    parts_ms = {"data": 1.417, "computation": 2.072, "communication": 6.779, "optimizer": 0.612, "idle": 1.413}
    assert {name: seconds * 1e3 for name, seconds in row["parts_s"].items()} == pytest.approx(parts_ms, abs=1e-3)
    code, text, _ = in_process("watch", "asynchronous-")
    assert code == 0
    assert "3 done, 1 failed" in text
    code, text, _ = in_process("logs", "asynchronous-")
    assert code == 0
    assert "step 1200/1200" in text


def test_resume_refuses_a_mode_that_is_gone(golden: Path, in_process: Muster) -> None:
    code, text, said = in_process("resume", "asynchronous-", "--set", "train.steps=2400")
    assert (code, text) == (exits.REFUSED, "")
    (run,) = (golden / "runs").glob("asynchronous-*")
    assert said == (
        f"muster: {run.name}: this version cannot continue it: mode: 0.1.0 was the last version with "
        "asynchronous; choose mode bucketed or ddp; jobs/examples/course/asynchronous.py shows training with a "
        "parameter server\n"
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["plain-2", "zero-", "pipeline-", "in-place-", "queued-"])
def test_resume_continues_from_the_checkpoint_also_a_run_of_slurm(golden: Path, in_process: Muster, name: str) -> None:
    steps, on = 402 if name == "in-place-" else 14, ("--on", "local") if name == "queued-" else ()
    code, text, said = in_process("resume", name, *on, *here(golden), "--set", f"train.steps={steps}")
    assert code == 0, said
    assert f"step {steps}/{steps}" in text + said


@pytest.mark.slow
@pytest.mark.ranks
def test_resume_continues_a_session_from_its_checkpoint(golden: Path, in_process: Muster) -> None:
    code, text, said = in_process("resume", "session-", "--from", "5", *here(golden))
    assert code == 0, said
    assert "step 12/12" in text + said
    (steps,) = (golden / "runs").glob("session-*/attempt-001/metrics-00000.jsonl")
    assert [json.loads(line)["step"] for line in steps.read_text().splitlines()] == [*range(6, 13)]


def here(golden: Path) -> tuple[str, ...]:
    """Options that replace the folders and the Python of the machine on which the runs were made."""
    site = golden / "site.yaml"
    site.write_text(f"interpreter: {sys.executable}\n")
    return ("--site", str(site), "--set", f"python={sys.executable}", "--set", f"workdir={golden}")


def test_a_run_with_layerwise_is_read_but_not_resumed(golden: Path, in_process: Muster) -> None:
    (run,) = (golden / "runs").glob("zero-*")
    job = run / "job.yaml"
    job.write_text(job.read_text().replace("  mode: zero3\n", "  mode: zero3\n  layerwise: true\n"))
    page = str(golden / "page.html")
    for words in (["status", "zero-"], ["why", "zero-"], ["compare", "zero-"], ["report", "zero-", "--output", page]):
        assert in_process(*words)[0] == 0, words
    code, _, said = in_process("resume", "zero-")
    assert code == exits.BAD_JOB
    assert "train.layerwise: 0.1.0 was the last version with this key" in said
