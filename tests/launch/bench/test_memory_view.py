"""`muster memory JOB.yaml` as a user types it."""

import json
from pathlib import Path

import pytest

from muster.collectives_bench.cost.modes import WAYS
from muster.collectives_bench.sizes import size_text
from muster.jobs.models.shapes import GPT_SHAPES
from muster.launch.cli import main

pytestmark = pytest.mark.command

JOB = """
name: held
nodes: 4
train:
  model: gpt-small
  data: synthetic
  mode: zero2
  batch_size: 32
  optimizer: {name: adamw}
"""
PARAMETERS = GPT_SHAPES["gpt-small"].parameter_count()
KINDS = ("parameters", "gradients", "optimizer", "buffers", "communication", "activations")


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def record(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict]:
    assert main(["memory", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {row["mode"]: row for row in found["modes"]} | {"all": found}


def test_every_mode_has_a_line_and_the_job_s_own_is_marked(capsys, job):
    assert main(["memory", job]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == (
        f"job held: gpt-small, {PARAMETERS / 1e6:.4g} million parameters, fp32, adamw, batch 32 on 4 ranks, gloo"
    )
    lines = [line for line in out.splitlines() if "MB" in line and line[:3].strip() in ("", "*")]
    assert [line.split()[line.startswith("*")] for line in lines] == list(WAYS)
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["zero2"]


def test_records_are_bytes(capsys, job):
    found = record(capsys, job, "--modes", "zero1,zero2,zero3")
    assert found["all"]["parameters"] == PARAMETERS
    one, two, three = (found[name]["memory"] for name in ("zero1", "zero2", "zero3"))
    for memory, whole in ((one, "parameters gradients"), (two, "parameters"), (three, "")):
        for kind, each in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
            assert memory[kind] == each * PARAMETERS / (1 if kind in whole else 4)
        assert memory["total"] == sum(memory[kind] for kind in KINDS)
    assert (found["zero2"]["is_jobs"], found["zero1"]["is_jobs"]) == (True, False)


@pytest.mark.parametrize(("world", "nodes"), [(None, 4), ("8", 8), ("1", 1)])
def test_the_cost_of_copies_in_memory_is_predicted(capsys, tmp_path, world, nodes):
    path = tmp_path / "copies.yaml"
    path.write_text(JOB + "checkpoint: {every_s: 600, memory_every_steps: 10}\n", encoding="utf-8")
    options = [] if world is None else ["--world", world]
    copies = record(capsys, str(path), *options)["all"]["copies"]
    part = 12 * PARAMETERS / nodes
    assert copies["held"] == part * min(nodes, 2)
    assert copies["most"] == 2 * copies["held"]
    assert copies["sent_per_step"] * 10 == copies["sent"] == (part if nodes > 1 else 0)
    assert main(["memory", str(path), *options]) == 0
    sent = f"a node sends {size_text(part)} per copy" if nodes > 1 else "nothing is sent"
    assert sent in capsys.readouterr().out


def test_ranks_and_values_of_the_job_can_be_others(capsys, job):
    found = record(capsys, job, "--world", "8", "--modes", "zero3")
    assert found["zero3"]["memory"]["optimizer"] == PARAMETERS
    halved = record(capsys, job, "--set", "train.activation_checkpointing=true", "--modes", "zero3")
    assert halved["zero3"]["memory"]["activations"] < 0.5 * 2 * found["zero3"]["memory"]["activations"]
    mixed = record(capsys, job, "--set", "train.precision=pure_bf16", "--modes", "ddp")["ddp"]["memory"]
    assert [mixed[kind] for kind in KINDS[:3]] == [2 * PARAMETERS, 2 * PARAMETERS, 12 * PARAMETERS]


def test_zero3_without_a_16_bit_shard_says_why_and_what_a_textbook_counts(capsys, job):
    given = (job, "--set", "train.precision=pure_bf16", "--modes", "zero3,fsdp")
    found = record(capsys, *given)
    ours, textbook = found["zero3"], found["fsdp"]["memory"]
    assert ours["memory"]["parameters"] == 0
    assert ours["memory"]["not_kept"] == textbook["parameters"] == 2 * PARAMETERS / 4
    assert found["fsdp"]["explained"] is None
    states = sum(textbook[kind] for kind in KINDS[:3])
    assert states == 16 * PARAMETERS / 4
    assert f"parameters {size_text(textbook['parameters'])}, all states {size_text(states)}" in ours["explained"]
    assert main(["memory", *given]) == 0
    out = capsys.readouterr().out
    assert ours["explained"] in out
    (marked,) = [line for line in out.splitlines() if "0 parameters: see the note below" in line]
    assert marked.split()[:2] == ["zero3", "0"]
    assert record(capsys, job, "--modes", "zero3")["zero3"]["explained"] is None, "fp32 has no second copy"


def test_what_does_not_fit_is_marked(capsys, job):
    found = record(capsys, job, "--memory", "1600M", "--modes", "ddp,zero3")
    assert (found["ddp"]["fits"], found["zero3"]["fits"]) == (False, True)
    assert main(["memory", job, "--memory", "1600M", "--modes", "ddp,zero3"]) == 0
    (marked,) = [line for line in capsys.readouterr().out.splitlines() if "does not fit" in line]
    assert marked.split()[0] == "ddp"
    assert "does not fit into nine tenths of 1.562 GB" in marked


def test_a_model_that_cannot_be_cut_has_no_memory(capsys, job):
    assert main(["memory", job, "--set", "train.model=vgg11", "--modes", "tensor"]) == 0
    assert "vgg11 has no width to split" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--modes", "zero4"), 2, "--modes: unknown mode 'zero4'; did you mean 'zero3'?"),
        (("--world", "0"), 2, "--world 0: must be 1 or more"),
        (("--memory", "much"), 2, "--memory much: expected a size such as 80G or 512M"),
        (("--rank", "0"), 2, "--rank: does not apply to a job file; leave it out, or name a run"),
        (("--microbatches", "0"), 2, "--microbatches 0: must be 1 or more"),
        (("--set", "train.batch=1"), 65, "train.batch: unknown key; did you mean 'batch_size'?"),
        (("--set", "ranks_per_node=slots"), 2, "ranks_per_node: slots depends on the hosts; give --world N"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, job, arguments, code, message):
    assert main(["memory", job, *arguments]) == code
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_file_that_is_not_there_and_a_job_that_does_not_train(capsys, tmp_path):
    assert main(["memory", str(tmp_path / "gone.yaml")]) == 65
    assert "gone.yaml: no such file" in capsys.readouterr().err
    other = tmp_path / "other.yaml"
    other.write_text("name: x\ncommand: [echo]\n")
    assert main(["memory", str(other)]) != 0
    assert "is a command: job" in capsys.readouterr().err


def test_a_product_has_a_line_of_its_own(capsys, job):
    split = "train.parallel={data: 2, pipe: 2, zero: 1, schedule: 1f1b, microbatches: 4}"
    job = Path(job)
    job.write_text(JOB.replace("  mode: zero2\n", ""))
    found = record(capsys, str(job), "--set", split)
    product = found["data 2, zero 1 x pipe 2 by 1f1b"]
    assert [mode for mode, row in found.items() if row.get("is_jobs")] == ["data 2, zero 1 x pipe 2 by 1f1b"]
    memory = product["memory"]
    assert memory["optimizer"] == memory["parameters"], "two states of half the parameters"
    assert 2 * PARAMETERS < memory["parameters"] < 2.1 * PARAMETERS, "the fuller half, with a copy of the embedding"
    by_hand = record(capsys, str(job), "--set", split, "--set", "train.cut=[block2]")
    assert by_hand["data 2, zero 1 x pipe 2 by 1f1b"]["memory"]["parameters"] > 3 * PARAMETERS
    assert found["all"]["ranks"] == 4


def test_a_product_keeps_its_line_on_another_number_of_ranks_and_of_micro_batches(capsys, job):
    Path(job).write_text(JOB.replace("  mode: zero2\n", ""))
    split = ("--set", "train.parallel={data: 2, pipe: 2, zero: 1, schedule: 1f1b, microbatches: 4}")
    four = record(capsys, job, *split)["data 2, zero 1 x pipe 2 by 1f1b"]["memory"]
    eight = record(capsys, job, *split, "--world", "8")["data 4, zero 1 x pipe 2 by 1f1b"]
    assert eight["is_jobs"]
    assert eight["memory"]["optimizer"] == four["optimizer"] / 2
    fewer = record(capsys, job, *split, "--microbatches", "2")["data 2, zero 1 x pipe 2 by 1f1b"]["memory"]
    assert fewer["activations"] > four["activations"], "of larger micro-batches"
    assert main(["memory", job, *split, "--world", "7"]) == 0
    assert "pipe 2 x tensor 1 do not divide 7 ranks" in capsys.readouterr().out


def test_a_pipeline_that_cannot_be_cut_is_told_in_its_line_and_a_product_is_refused(capsys, job):
    nano = ("--set", "train.model=gpt-nano", "--set", "train.mode=zbv")
    assert record(capsys, job, *nano)["zbv"]["memory"] is None
    split = ("--set", "train.parallel={data: 3, pipe: 2}")
    Path(job).write_text(JOB.replace("  mode: zero2\n", ""))
    assert main(["memory", job, *split]) == 78
    assert "data 3 x pipe 2 makes 6 ranks, but the job has 4" in capsys.readouterr().err
