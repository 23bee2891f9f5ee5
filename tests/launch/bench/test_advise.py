"""`muster advise` and `muster predict --goodput` on the command line: answers, files, and mistakes."""

import json
from pathlib import Path

import pytest

from muster.jobs.spec.load import load_job
from muster.launch import cli
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
    found = advised(capsys, job, "--what-if", "nodes=8,link=100gbit,gpu=h100,batch=64")
    assert (found["ranks"], found["nodes"], found["batch"], found["device"]) == (8, 8, 64, "h100")


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
        (("--link", "1Gbit", "--what-if", "gpu=h1000"), "GPU"),
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


def test_goodput_of_a_month(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(job), "--goodput", "--nodes", "2000", "--node-mtbf", "100d", "--stall", "1s"]
    assert cli.main([*words, "--save-time", "30s", "--days", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mtbf_s"] == pytest.approx(4320)
    assert 0.9 < found["goodput"] < 1
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["at"]["5 %"] <= found["at"]["95 %"]
    assert cli.main([*words, "--days", "1"]) == 0
    assert "best interval between saves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--goodput",), "needs --node-mtbf"),
        (("--goodput", "--node-mtbf", "soon"), "--node-mtbf soon: expected a time such as"),
        (("--goodput", "--node-mtbf", "1s", "--nodes", "1000000"), "failures are too many to simulate"),
        (("--goodput", "--node-mtbf", "9d", "--spares", "-1"), "--spares -1: must be a number from 0"),
    ],
)
def test_mistakes_about_goodput(
    job: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["predict", str(job), *words]) != 0
    assert message in capsys.readouterr().err
