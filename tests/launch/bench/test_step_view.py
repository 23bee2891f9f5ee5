"""`muster predict JOB.yaml` as a user types it."""

import json
from pathlib import Path

import pytest

from muster.launch.cli import main

pytestmark = [pytest.mark.command, pytest.mark.slow]

FAST = ("--link", "1gbit", "--latency", "500us")
JOB = """
name: steps
nodes: 4
train:
  model: vgg11
  data: digits
  mode: ddp
  batch_size: 64
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def predict(*arguments: str) -> int:
    return main(["predict", *arguments])


def record(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert predict(*arguments, "--json") == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_every_mode_has_a_line_with_its_step_and_memory(capsys, job):
    assert predict(*FAST, job, "--forward-ms", "100", "--backward-ms", "300") == 0
    out = capsys.readouterr().out
    assert "job steps: vgg11, 9.23 million parameters, batch 64 on 4 ranks of 4 nodes; profile link of 1gbit" in out
    assert "compute times of a rank: forward 100 ms, backward 300 ms, optimizer 0 (given)" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert {"single", "ddp", "zero3", "zbv", "tensor"} <= set(lines)
    assert "vgg11 has no width to split" in lines["tensor"]
    assert "best: " in out


def test_a_product_is_named_beside_the_modes_that_are_compared(capsys, job):
    Path(job).write_text(JOB.replace("  mode: ddp\n", "  parallel: {data: 2, pipe: 2, microbatches: 4}\n"))
    times = ("--forward-ms", "100", "--backward-ms", "300")
    assert predict(*FAST, job, *times) == 0
    out = capsys.readouterr().out
    assert "the job's own split, data 2 x pipe 2 by 1f1b, was not compared" in out
    own = record(capsys, *FAST, job, *times)["steps"][-1]
    assert (own["mode"], own["step"], own["memory"]["total"] > 0) == ("data 2 x pipe 2 by 1f1b", None, True)


def test_without_compute_times_it_says_what_it_predicts(capsys, job):
    assert predict(*FAST, job) == 0
    out = capsys.readouterr().out
    assert "compute times are unknown, so only memory and total communication (none hidden) are predicted" in out
    assert "no mode is chosen without compute times" in out
    assert "communication" in out
    found = record(capsys, *FAST, job)
    assert (found["compute"], found["ranking"]) == (None, None)
    assert {each["step"] for each in found["steps"]} == {None}


def test_records_are_seconds_and_bytes(capsys, job):
    found = record(capsys, *FAST, job, "--forward-ms", "100", "--backward-ms", "300", "--modes", "allreduce,zero1")
    assert [each["mode"] for each in found["steps"]] == ["allreduce", "zero1"]
    allreduce = found["steps"][0]
    assert allreduce["step"]["seconds"] == pytest.approx(allreduce["compute_s"] + allreduce["exposed"]["seconds"])
    assert allreduce["memory"]["parameters"] == 4 * found["parameters"]
    assert found["ranking"]["best"] == "zero1"


def test_buckets_are_a_table_with_the_best_marked(capsys, job):
    given = (*FAST, job, "--modes", "bucketed", "--forward-ms", "100", "--backward-ms", "300")
    assert predict(*given, "--buckets", "1M:64M:4") == 0
    out = capsys.readouterr().out
    (best,) = [line for line in out.splitlines() if line.endswith(" best")]
    assert " MB " in best
    found = record(capsys, *given, "--buckets")["buckets"]
    steps = {point["bucket_bytes"]: point["step_s"] for point in found["points"]}
    assert steps[found["best"]] == min(steps.values())
    assert found["torch_margin"] == pytest.approx(steps[25 * 2**20] / min(steps.values()) - 1)


def test_closed_forms_stand_below_with_the_numbers_filled_in(capsys, job):
    found = record(capsys, *FAST, job, "--modes", "ddp,gpipe")
    closed, nbytes = found["closed_forms"], 4 * found["parameters"]
    assert [closed["ring"][key] for key in ("bytes", "steps", "bytes_per_rank")] == [nbytes, 6, 6 * nbytes / 4]
    assert closed["ring"]["seconds"] == pytest.approx(6 * 500e-6 + 1.5 * nbytes / 125e6)
    pipe = closed["pipeline"]
    assert (pipe["stages"], len(pipe["boundaries"])) == (4, 3)
    assert pipe["forward_bytes"] == pipe["backward_bytes"] == 64 * sum(pipe["boundaries"])
    bucket = closed["bucket"]
    s, w, o = (bucket[key] for key in ("bytes", "bandwidth", "overhead_s"))
    assert (w, o) == (pytest.approx(125e6 / 1.5), pytest.approx(6 * 500e-6 + 100e-6, rel=1e-3)), "100 us: gloo's call"
    assert (bucket["buckets"], bucket["bucket_bytes"]) == (
        pytest.approx((s / (w * o)) ** 0.5),
        pytest.approx((s * w * o) ** 0.5),
    )
    assert predict(*FAST, job, "--modes", "ddp", "--buckets") == 0
    out = capsys.readouterr().out
    assert f"x {w / 1e6:.6g}e6 B/s x 3.1 ms) = 2.945 MB (simulated: " in out
    assert "(P - 1) B N_f" not in out, "no pipeline was asked for"


def test_boundaries_are_those_of_the_job_s_own_pipeline(capsys, job):
    gpt = "  model: gpt-small\n  data: synthetic\n  parallel: {data: 2, pipe: 2, microbatches: 4}\n"
    Path(job).write_text(JOB.replace("  model: vgg11\n  data: digits\n  mode: ddp\n", gpt))
    assert predict(*FAST, job, "--modes", "ddp") == 0
    out = capsys.readouterr().out
    assert "1f1b with P = 2 stages: a forward pass sends (P - 1) B N_f = 1 x 64 x 393216 = 25.1658e6 bytes," in out
    assert predict(*FAST, job, "--modes", "ddp", "--set", "nodes=1") == 0
    assert "closed forms" not in capsys.readouterr().out, "a rank alone sends nothing"


def test_a_mode_that_does_not_fit_is_not_chosen(capsys, job):
    found = record(capsys, *FAST, job, "--forward-ms", "1", "--backward-ms", "1", "--memory", "150M")
    fits = {each["mode"]: each["fits"] for each in found["steps"]}
    assert not fits["single"]
    assert fits["zero3"]
    assert fits[found["ranking"]["best"]]
    assert predict(*FAST, job, "--forward-ms", "1", "--backward-ms", "1", "--memory", "1M") == 0
    assert "no mode fits" in capsys.readouterr().out


def test_options_change_the_job(capsys, job):
    found = record(capsys, *FAST, job, "--nodes", "2", "-n", "3", "--set", "train.batch_size=12")
    assert (found["ranks"], found["nodes"], found["batch"]) == (6, 2, 12)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_written(job, tmp_path, suffix):
    path = tmp_path / f"steps{suffix}"
    given = ("--forward-ms", "1", "--backward-ms", "1", "--modes", "ddp,zero1", "--buckets", "1M:4M")
    assert predict(*FAST, job, *given, "--plot", str(path)) == 0
    assert path.stat().st_size > 1000


def run_of(folder: Path, job: str = JOB) -> str:
    run = folder / "runs" / "steps-20260101T000000.000Z-abcdef"
    (run / "attempt-000").mkdir(parents=True)
    (run / "job.yaml").write_text(job)
    (run / "events.jsonl").touch()
    for rank, slower in enumerate((1.0, 1.5)):
        rows = [
            {"step": step, "samples": 32, "forward_s": 0.1 * slower, "backward_s": 0.2 * slower, "optimizer_s": 0.01}
            for step in range(1, 8)
        ]
        rows[0]["forward_s"] = 9.0
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (run / "attempt-000" / f"metrics-{rank:05d}.jsonl").write_text(lines)
    return str(folder / "runs")


def test_compute_times_come_from_a_run_of_the_same_model_for_as_many_samples(capsys, job, tmp_path):
    runs = run_of(tmp_path)
    found = record(capsys, *FAST, job, "--run", "steps", "--runs", runs)["compute"]
    # the slower rank's, for 16 samples of 64 on 4 ranks where it had 32
    assert found["forward_s"] == pytest.approx(0.075)
    assert found["backward_s"] == pytest.approx(0.15)
    assert found["optimizer_s"] == pytest.approx(0.01)
    assert "the slowest of 2 ranks" in found["source"]
    assert "16 samples instead of 32" in found["source"]


def test_a_run_of_another_model_is_refused(capsys, job, tmp_path):
    runs = run_of(tmp_path, JOB.replace("vgg11", "vgg13"))
    assert predict(*FAST, job, "--run", "steps", "--runs", runs) == 78
    assert "its train.model differs from the job's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--modes", "zero_2"], 2, "did you mean 'zero2'"),
        (["--forward-ms", "5"], 2, "belong together"),
        (["--optimizer-ms", "5"], 2, "needs --forward-ms"),
        (["--forward-ms", "5", "--backward-ms", "-1"], 2, "must be a number of at least 0"),
        (["--memory", "much"], 2, "such as 80G"),
        (["--buckets", "1M:x"], 2, "--buckets:"),
        (["--microbatches", "0"], 2, "must be 1 or more"),
        (["--plot", "steps.txt"], 2, "--plot"),
        (["--set", "train.modle=vgg11"], 65, "did you mean"),
        (["--set", "ranks_per_node=slots"], 2, "depends on the hosts; give -n M"),
    ],
)
def test_mistakes_are_named(capsys, job, arguments, code, message):
    assert predict(*FAST, job, *arguments) == code
    assert message in capsys.readouterr().err


def test_only_jobs_that_train_have_steps(capsys, tmp_path):
    path = tmp_path / "hello.yaml"
    path.write_text("bench: {operation: hello}\n")
    assert predict(*FAST, str(path)) == 78
    assert "is a bench: job" in capsys.readouterr().err
