"""`muster advise` and `muster predict --goodput` on the command line: answers, files, and mistakes."""

import json
from pathlib import Path

import pytest

from muster.jobs.spec.load import load_job
from muster.launch import cli
from muster.launch.bench.goodput import FailingRun
from muster.launch.common.kinds import KINDS

pytestmark = pytest.mark.command

JOB = """\
name: nano
nodes: 4
train:
  model: gpt-nano
  data: synthetic
  batch_size: 4
  mode: ddp
  steps: 10
  optimizer: {name: adamw, lr: 0.001}
"""
TIMES = {
    "muster_layers": 1,
    "model": "gpt-nano",
    "cores": 2,
    "ranks": 4,
    "passes": [
        {"samples": samples, "active": active, "forward_s": 1e-3 * samples * slow, "backward_s": 2e-3 * samples * slow}
        for samples in (1, 16)
        for active, slow in ((1, 1.0), (4, 2.0))
    ],
    "updates": [{"active": 1, "seconds": 0.001}],
    "variants": {"compile": [0.001, 0.002], "cuda_graph": None},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "times.json").write_text(json.dumps(TIMES))
    return tmp_path / "job.yaml"


def asked(job: Path, *words: str) -> list[str]:
    return ["advise", str(job), "--times", str(job.parent / "times.json"), *words]


def advised(capsys: pytest.CaptureFixture[str], job: Path, *words: str) -> dict[str, object]:
    assert cli.main(asked(job, "--json", *words)) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_best_split_is_named_and_written_as_a_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = job.parent / "best.yaml"
    assert cli.main(asked(job, "--link", "20Mbit", "--apply", str(out), "-o", str(job.parent / "a.json"))) == 0
    printed = capsys.readouterr()
    record = json.loads((job.parent / "a.json").read_text())
    assert record["best"]["plan"] in printed.out
    assert f"wrote {out}" in printed.err
    before, after = (load_job(path, KINDS, [], allow_unread=True).job for path in (job, out))
    assert after.settings.split(4).pipe == 4  # a slow link: messages of a pipeline are shorter than gradients
    assert after.settings.optimizer == before.settings.optimizer
    assert after.settings.batch_size == before.settings.batch_size


def test_a_cluster_that_one_does_not_have(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys, job, "--what-if", "nodes=8,link=100gbit,batch=64")
    assert (found["ranks"], found["nodes"], found["batch"], found["device"]) == (8, 8, 64, "cpu")


def test_memory_excludes_splits_and_options_are_compared(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys, job, "--link", "1Gbit", "--memory", "1k", "--options", "compile,cuda_graph")
    assert found["best"] is None
    found = advised(capsys, job, "--link", "1Gbit", "--options", "compile,cuda_graph")
    compiled, graphed = found["options"]  # type: ignore[misc]
    assert compiled["factor"] == pytest.approx(0.003 / (0.003 * 2))
    assert compiled["step"]["seconds"] < found["best"]["step"]["seconds"]  # type: ignore[index]
    assert graphed["factor"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--link", "1Gbit", "--what-if", "planets=2"), "--what-if planets=2: expected KEY=VALUE with a key of nodes"),
        (("--what-if", "latency=1ms", "--link", "1Gbit"), "belongs to a link; add link=RATE"),
        (("--link", "1Gbit", "--options", "fast"), "--options fast: unknown; choose from compile"),
        ((), "give either --profile FILE.json"),
        (("--link", "1Gbit", "--set", "train.model=gpt-micro"), "has times of gpt-nano, but the job trains gpt-micro"),
    ],
)
def test_mistakes_are_named(
    job: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(asked(job, *words)) != 0
    assert message in capsys.readouterr().err


# The shares are the means of 40 simulated months with failures at random times; the formula is within 0.05 points.
SIMULATED = [
    (FailingRun(4320.0, stall_s=1.0, save_s=30.0), 93.0, {"useful": 0.9706, "restarts": 0.0015}),
    (FailingRun(270.0, stall_s=0.5, save_s=30.0), 17.0, {"useful": 0.8220, "restarts": 0.0234}),
    (FailingRun(86400.0, stall_s=1.0, save_s=1.0), 416.0, {"useful": 0.9951, "restarts": 0.0001}),
]


@pytest.mark.parametrize(("run", "interval_s", "simulated"), SIMULATED)
def test_goodput_is_that_of_simulated_months(run: FailingRun, interval_s: float, simulated: dict[str, float]) -> None:
    shares = run.shares(interval_s)
    assert sum(shares.values()) == pytest.approx(1)
    assert {kind: shares[kind] for kind in simulated} == pytest.approx(simulated, abs=5e-4)


def test_dalys_interval_is_the_best_and_youngs_near_it() -> None:
    run = FailingRun(4320.0, step_s=0.01, stall_s=1.0, save_s=0.0)
    assert run.young_s == pytest.approx(92.95, rel=1e-3)
    assert run.daly_s == pytest.approx(run.young_s, rel=0.02)
    best = run.shares(run.daly_s)["useful"]
    assert all(run.shares(factor * run.daly_s)["useful"] < best for factor in (0.5, 0.8, 1.25, 2.0))
    assert FailingRun(1.0, stall_s=60.0, step_s=0.1).daly_s == 1.0
    assert FailingRun(4320.0, stall_s=0.0, step_s=2.0).daly_s == 2.0


def test_goodput_of_a_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(job), "--goodput", "--nodes", "2000", "--node-mtbf", "100d", "--stall", "1s"]
    assert cli.main([*words, "--save-time", "30s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["times"]["mtbf_s"] == pytest.approx(4320)
    assert found["interval_s"] == found["daly_s"]
    assert found["goodput"] == pytest.approx(0.9704, abs=1e-3)
    assert cli.main([*words, "--save-every", "30min"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2000 nodes: one failure in 1 h 12 min"
    assert [line.rsplit("  ", 1)[1] for line in lines[4:7]] == ["Young 1974", "Daly 2006", "asked for"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--goodput",), "needs --node-mtbf"),
        (("--goodput", "--node-mtbf", "soon"), "--node-mtbf soon: expected a time such as"),
        (("--goodput", "--node-mtbf", "9d", "--nodes", "0"), "--nodes 0: must be 1 or more"),
    ],
)
def test_mistakes_about_goodput(
    job: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["predict", str(job), *words]) != 0
    assert message in capsys.readouterr().err


def test_a_run_that_fails_all_the_time_does_nothing_useful(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(job), "--goodput", "--nodes", "1000000", "--node-mtbf", "1s", "--json"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["goodput"] == pytest.approx(0)
