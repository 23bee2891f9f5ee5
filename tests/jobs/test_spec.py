"""The typed job: what its sections refuse by themselves, and what only the world size shows."""

import shutil
import subprocess
from typing import Any

import pytest
from pydantic import ValidationError

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.job import MAX_STRING_BYTES, CommandSettings, Job
from muster.jobs.spec.modes import Parallel
from muster.jobs.spec.train import TrainSettings
from muster.jobs.spec.train_fields import DataSettings, ModelSettings, OptimizerSettings


def train(**settings: Any) -> TrainSettings:
    return TrainSettings.model_validate({"model": "vgg11", "data": "digits", **settings})


def test_a_word_is_short_for_a_named_section() -> None:
    assert train() == train(model={"name": "vgg11"}, data={"name": "digits"})
    assert train(model="gpt-nano", data={"text": "/x"}).data.text == "/x"


SPLIT: Any = {"d_model": 24, "d_ff": 48, "layers": 2, "heads": 6, "context": 16, "vocabulary": 252}
GPT: Any = {"model": SPLIT, "data": "synthetic"}
TENSOR: Any = {**GPT, "mode": "tensor"}
FOUR_HEADS: Any = {**GPT, "model": {**SPLIT, "heads": 4}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "vgg12"}, "unknown model 'vgg12'; did you mean"),
        ({"model": {}}, "a model needs a name or all four sizes; missing: d_model, d_ff, layers, heads"),
        ({"model": {"d_model": 8, "heads": 2}}, "missing: d_ff, layers"),
        ({"model": {"name": "gpt-nano", "layers": 3}}, "a named model has its sizes already; remove name or layers"),
        ({"data": "digts"}, "unknown data 'digts'; did you mean 'digits'"),
        ({"data": {"name": "digits", "seed": 3}}, "seed is only for partition; remove it, or add partition"),
        ({"data": {"name": "digits", "partition": [0.8, 0.3]}}, "adds up to more than 1; give shares of the training"),
        ({"data": {"text": "x", "partition": [0.5]}}, "partition is for data sets of images, but data is text; remove"),
        ({"data": {"name": "digits", "text": "x"}}, "data must be a name, {text: PATH} or {make"),
        ({"data": {}}, "data must be a name, {text: PATH} or {make"),
        ({"steps": 10**25}, "less than or equal to 1000000000000"),
        ({"seed": 2**64}, "less than 18446744073709551616"),
        ({"mode": "dpp"}, "unknown mode 'dpp'; did you mean 'ddp'"),
        ({"epochs": 1, "steps": 1}, "give epochs or steps, not both"),
        ({"mode": "ddp", "parallel": {"data": 2}}, "give mode or parallel, not both; null removes one"),
        (
            {"mode": "ddp", "exact": True},
            "needs one of the modes gather_scatter, .*, bucketed, zero1, zero2, zero3, model, .*, zbv, got ddp",
        ),
        ({"parallel": {"data": 2, "sync": "ddp"}, "exact": True}, "exact: true needs one of the modes .* got ddp"),
        ({"mode": "bucketed", "bucket_size_mb": 0}, "greater than 0"),
        ({"mode": "single", "communication_dtype": "bf16"}, "communication_dtype needs one of the modes .* got single"),
        ({"communication_dtype": "bf16"}, "communication_dtype needs one of the modes .* got ddp; remove it"),
        (
            {"mode": "flat", "exact": True, "communication_dtype": "bf16"},
            "guarantees the same bits; remove one of the two",
        ),
        ({"mode": "fsdp", "exact": True}, "exact: true needs one of the modes .* got fsdp"),
        ({"mode": "fsdp", "communication_dtype": "bf16"}, "communication_dtype needs one of the modes .* got fsdp"),
        ({"mode": "zero2", "exact": True, "accumulate": "sharded"}, "set accumulate: local, or exact: false"),
        ({"mode": "zero1", "accumulate": "whole"}, "'local' or 'sharded'"),
        ({"parallel": {"data": 2, "zero": 1, "sync": "ddp"}}, "zero: 1 cannot be combined with sync: ddp"),
        ({"parallel": {"data": 2, "zero": 1, "sync": "fsdp"}}, "zero: 1 cannot be combined with sync: fsdp"),
        ({"parallel": {"data": 2, "sync": "sharded"}}, "zero: 0 cannot be combined with sync: sharded"),
        ({"parallel": {"data": 2, "zero": 4}}, "zero"),
        (
            {"parallel": {"data": 2, "sync": "none"}},
            "sync: none leaves the gradients of 2 data-parallel ranks different",
        ),
        ({"mode": "terapipe"}, "model: vgg11: terapipe slices the sequences of built-in GPTs only"),
        (
            {"mode": "terapipe", **GPT, "model": {"name": "gpt-nano", "dropout": 0.1}},
            "terapipe cannot be combined with dropout",
        ),
        (
            {"mode": "terapipe", **GPT, "activation_checkpointing": True},
            "terapipe cannot be combined with activation_ch",
        ),
        ({"parallel": {"tensor": 2}}, "model: vgg11: tensor parallel can split the layers of a gpt"),
        (
            {**GPT, "parallel": {"tensor": 2, "data": 2, "zero": 3}},
            "zero: 3 with sync: sharded cannot be combined with tensor",
        ),
        (
            {**GPT, "parallel": {"tensor": 2, "data": 2, "sync": "fsdp"}},
            "zero: 3 with sync: fsdp cannot be combined with",
        ),
        ({**GPT, "mode": "tensor", "exact": True}, "exact: true needs one of the modes"),
        (
            {**GPT, "parallel": {"tensor": 2, "pipe": 2}, "exact": True},
            "exact: true cannot be combined with tensor parallel",
        ),
        ({**GPT, "mode": "tensor", "communication_dtype": "bf16"}, "communication_dtype needs one of the modes"),
        (
            {"mode": "1f1b", "grad_accumulation": 2},
            "grad_accumulation: 2 cannot be combined with 1f1b, .*, or set microbatches",
        ),
        ({"parallel": {"data": 2, "zero": True}}, "zero\n.*must be 0, 1, 2 or 3, got true"),
        ({"parallel": {"data": 2, "zero": 1.0}}, "zero\n.*must be 0, 1, 2 or 3, got 1.0"),
        ({"parallel": {"pipe": 2, "sync": "fsdp"}}, "sync: fsdp cannot be combined with a pipeline"),
        (
            {"parallel": {"pipe": 2, "zero": 3}},
            "zero: 3 cannot be combined with a pipeline, because .*; use zero: 0, 1 or 2",
        ),
        ({"parallel": {"pipe": 2, "data": 2, "sync": "ddp"}}, "sync: ddp cannot be combined with a pipeline, because"),
        ({"parallel": {"data": 2, "microbatches": 2}}, "microbatches is for pipelines; set pipe and schedule"),
        ({"parallel": {"pipe": 2, "schedule": "1f2b"}}, "'1f1b', 'interleaved', 'zb1p', 'zbv' or 'terapipe'"),
        (
            {"parallel": {"data": 2, "pipe": 2}, "exact": True},
            "exact: true cannot be combined with 2 data-parallel pipelines",
        ),
        ({"mode": "1f1b", "exact": True, "virtual_ranks": 4}, "1f1b has one virtual rank, but virtual_ranks is 4"),
        ({"mode": "gpipe", "compile": True}, "gpipe cannot be combined with compile yet; set compile: false"),
        ({"mode": "zbv", "communication_dtype": "bf16"}, "zbv sends activations and gradients in their own dtype"),
        ({"mode": "gpipe", "cut": "weight"}, "'count', 'parameters', 'flops' or 'profile'"),
        (
            {"parallel": {"pipe": 2, "microbatches": 4}, "microbatches": 8},
            "microbatches: 8 and parallel.microbatches: 4 set the same thing; remove",
        ),
        ({"mode": "interleaved", "chunks": 1}, "greater than or equal to 2"),
        ({"virtual_ranks": 4}, "virtual_ranks needs exact: true"),
        (
            {"batch_size_per_rank": 4, "batch_size": 8},
            r"give batch_size \(of all ranks together\) or batch_size_per_rank, not",
        ),
        ({"model": "gpt-nano"}, "data digits has images, but model gpt-nano reads tokens"),
        ({"data": "python-source"}, "data python-source has tokens, but model vgg11 reads images"),
        ({"data": {"text": "x"}}, "data text has tokens, but model vgg11 reads images"),
        ({"optimizer": {"name": "sgd", "betas": [0.9, 0.9]}}, "sgd has no betas"),
        ({"optimizer": {"name": "adamw", "momentum": 0.9}}, "adamw has no momentum"),
        ({"optimizer": {"lr": float("nan")}}, "finite number"),
        ({"optimizer": {"lr": float("inf")}}, "finite number"),
        ({"batch_size": "64"}, "valid integer"),
        ({"batch_size": True}, "valid integer"),
        ({"unknown_key": 1}, "Extra inputs"),
    ],
)
def test_a_section_that_disagrees_with_itself_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        train(**settings)


def test_a_job_survives_the_start_message() -> None:
    job = Job(
        name="j",
        kind="train",
        settings=train(mode="allreduce", exact=True, optimizer={"name": "sgd", "lr": 0.1}),
    )
    sent = job.model_dump(mode="json", exclude_unset=True)
    assert TrainSettings.model_validate(sent["settings"]) == job.settings


def test_mode_and_parallel_expand_to_the_same_split() -> None:
    assert train(mode="allreduce").split(4) == Parallel(data=4, sync="allreduce")
    assert train(parallel={"data": 4, "sync": "allreduce"}).split(4) == Parallel(data=4, sync="allreduce")


@pytest.mark.parametrize("sync", ["flat", "overlap", "bucketed"])
def test_a_written_split_takes_what_its_mode_takes(sync: str) -> None:
    more = {"bucket_size_mb": None} if sync == "bucketed" else {}
    written = train(parallel={"data": 2, "sync": sync}, exact=True, **more)
    assert written.mode_name == sync
    assert written.split(2) == train(mode=sync).split(2)


@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3", "fsdp"])
def test_a_written_split_names_the_stage_of_zero_alone(mode: str) -> None:
    parallel = {"data": 2, "sync": "fsdp"} if mode == "fsdp" else {"data": 2, "zero": int(mode[-1])}
    written = train(parallel=parallel)
    assert written.mode_name == mode
    assert written.split(2) == train(mode=mode).split(2)
    assert TrainSettings.model_validate(written.model_dump(mode="json", exclude_unset=True)) == written


def is_product(wanted: dict[str, Any]) -> bool:
    return len({"data", "pipe", "tensor"} & wanted.keys()) > 1


PIPE: Any = {"pipe": 4, "sync": "none"}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"mode": "1f1b"}, {**PIPE, "schedule": "1f1b", "microbatches": 16}),
        ({"mode": "1f1b", "batch_size": 6}, {**PIPE, "schedule": "1f1b", "microbatches": 6}),
        ({"mode": "gpipe", "microbatches": 3}, {**PIPE, "schedule": "gpipe", "microbatches": 3}),
        ({"mode": "model", "microbatches": 3}, {**PIPE, "schedule": "model", "microbatches": 1}),
        ({"mode": "interleaved", "chunks": 3}, {**PIPE, "schedule": "interleaved", "microbatches": 16, "chunks": 3}),
        ({"mode": "zbv", "chunks": 3}, {**PIPE, "schedule": "zbv", "microbatches": 16, "chunks": 2}),
        ({"parallel": {"pipe": 4}}, {**PIPE, "schedule": "1f1b", "microbatches": 16}),
        ({"parallel": {"pipe": 4, "schedule": None}}, {**PIPE, "schedule": "1f1b", "microbatches": 16}),
        ({"parallel": {"pipe": 4}, "microbatches": 7}, {**PIPE, "schedule": "1f1b", "microbatches": 7}),
        (
            {"parallel": {"pipe": 4, "schedule": "zb1p", "microbatches": 5}},
            {**PIPE, "schedule": "zb1p", "microbatches": 5},
        ),
        (
            {"parallel": {"pipe": 2, "data": 2}},
            {"data": 2, "pipe": 2, "schedule": "1f1b", "sync": "bucketed", "microbatches": 8},
        ),
        (
            {"parallel": {"pipe": 2, "data": 2, "zero": 1, "schedule": "gpipe"}},
            {"data": 2, "pipe": 2, "schedule": "gpipe", "sync": "sharded", "zero": 1, "microbatches": 8},
        ),
        ({**FOUR_HEADS, "parallel": {"tensor": 4}}, {"tensor": 4}),
        ({**FOUR_HEADS, "parallel": {"tensor": 2, "data": 2}}, {"tensor": 2, "data": 2, "sync": "ddp"}),
        (
            {**FOUR_HEADS, "parallel": {"tensor": 2, "data": 2, "zero": 2}},
            {"tensor": 2, "data": 2, "sync": "sharded", "zero": 2},
        ),
        (
            {**FOUR_HEADS, "parallel": {"tensor": 2, "pipe": 2}},
            {"tensor": 2, "pipe": 2, "schedule": "1f1b", "microbatches": 8},
        ),
    ],
)
def test_a_mode_or_a_split_is_completed(settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    job = train(**settings)
    job.check(4)
    assert job.split(4) == Parallel(**wanted)
    assert (job.virtual_world_size(4), job.accumulation(4)) == (wanted.get("data", 1), wanted.get("microbatches", 1))
    if "pipe" in wanted:
        assert job.virtual_world_size(1) == wanted.get("data", 1), "who resumes asks before the ranks are known"
    assert (job.splits_layers, job.is_product) == ("tensor" in wanted, is_product(wanted))
    assert TrainSettings.model_validate(job.model_dump(mode="json", exclude_unset=True)) == job


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        (
            {"mode": "1f1b"},
            40,
            "train.mode: 1f1b: 40 ranks make 40 stages, but the model has 31 layers; use at most 31 ranks",
        ),
        ({"mode": "zbv"}, 16, "16 ranks of 2 stages each make 32 stages, but the model has 31 layers; use at most 15"),
        (
            {"mode": "interleaved", "chunks": 10},
            4,
            "4 ranks of 10 stages each make 40 .*; use at most 3 ranks or at most 7 chunks, or a deeper model",
        ),
        ({"mode": "interleaved", "chunks": 40}, 2, "2 ranks of 40 .* make 80 .*; use at most 15 chunks, or a deeper"),
        ({"mode": "interleaved", "chunks": 40}, 16, "make 640 .*; use fewer ranks and chunks, for at most 31"),
        (
            {"parallel": {"pipe": 4, "schedule": "zbv"}, "model": "gpt-nano", "data": "synthetic"},
            4,
            "parallel: zbv: 4 ",
        ),
        ({"parallel": {"pipe": 2, "data": 2}}, 3, "data 2 x pipe 2 makes 4 ranks, but the job has 3"),
        ({"mode": "1f1b", "microbatches": 65}, 2, "a batch of 64 has too few samples for 65 micro-batches"),
        (
            {"parallel": {"pipe": 2, "data": 2, "microbatches": 40}},
            4,
            "64 has too few samples for 40 micro-batches for each of 2 pipelines; use at most 32",
        ),
        ({"parallel": {"pipe": 2, "data": 2}, "batch_size": 1}, 4, "1 is less than one sample for each of 2 pipelines"),
        ({"mode": "1f1b", "cut": ["conv3", "conv9"]}, 3, "train.cut: there is no layer 'conv9'; the model has conv1,"),
        ({"mode": "1f1b", "cut": ["conv3"]}, 3, "train.cut: .* make 2 stages of 31 layers, not 3"),
        ({"mode": "1f1b", "cut": [9, 9]}, 3, "train.cut: .* 9 is not greater than 9"),
        (TENSOR, 4, r"mode: tensor: 4 ranks do not divide heads 6 \(remainder 2\); use 2 or 3 or 6 ranks, which"),
        (
            {**TENSOR, "model": {**SPLIT, "d_ff": 39}},
            2,
            r"d_ff 39 \(remainder 1\); use 3 ranks, which divide heads 6, d_ff 39",
        ),
        (
            {**TENSOR, "model": {**SPLIT, "vocabulary": 257}},
            2,
            r"257 \(remainder 1\); no number of ranks divides heads",
        ),
        ({**TENSOR, "sequence_parallel": True}, 3, r"context 16 \(remainder 1\); use 2 ranks, which .*, context 16"),
        (
            {**GPT, "parallel": {"tensor": 2, "data": 2}, "batch_size": 1},
            4,
            "for each of 2 data-parallel ranks; use at least 2",
        ),
        ({**GPT, "parallel": {"tensor": 2, "data": 2}}, 8, "data 2 x tensor 2 makes 4 ranks, but the job has 8"),
        ({**GPT, "parallel": {"tensor": 2, "pipe": 9}}, 18, "make 9 stages, but the model has 5 layers"),
        ({"parallel": {"data": 2}}, 4, "train.parallel: data 2 makes 2 ranks, but the job has 4"),
        ({"batch_size": 3}, 4, "3 is less than one sample for each of 4 ranks; use at least 4"),
        ({"batch_size": 7, "grad_accumulation": 2}, 4, "4 ranks x 2 accumulation steps; use at least 8"),
        ({"mode": "allreduce", "exact": True}, 3, "4 virtual ranks cannot be divided evenly among 3 ranks"),
    ],
)
def test_what_the_ranks_cannot_do_is_refused_before_one_is_started(
    settings: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        train(**settings).check(ranks)


def test_what_a_mode_does_not_read_may_stand_there() -> None:
    more = {"accumulate": "sharded", "reshard_after_forward": False}
    assert train(mode="bucketed", exact=True, grad_accumulation=2, **more).accumulate == "sharded"


def test_a_mode_that_is_null_is_not_given() -> None:
    job = train(mode=None, parallel={"pipe": 2})
    assert (job.mode_name, job) == ("1f1b", train(parallel={"pipe": 2}))
    assert train(mode=None) == train()
    assert train(mode="gpipe", parallel=None).mode_name == "gpipe"


def test_a_split_without_synchronization_is_the_mode_single() -> None:
    assert train(parallel={"data": 1, "sync": "none"}).mode_name == "single"


def test_a_batch_of_one_sample_for_every_rank_is_taken() -> None:
    train(batch_size=4).check(4)


def test_virtual_ranks_do_not_depend_on_the_ranks() -> None:
    exact = train(mode="allreduce", exact=True)
    assert [exact.virtual_world_size(world_size) for world_size in (1, 2, 4)] == [4, 4, 4]
    assert train().virtual_world_size(3) == 3


def test_the_kind_of_model_follows_from_its_name() -> None:
    assert ModelSettings(name="vgg11").is_vgg
    assert not ModelSettings(name="gpt-nano").is_vgg
    assert not ModelSettings(d_model=8, d_ff=8, layers=1, heads=2).is_vgg


def test_each_optimizer_takes_its_own_settings() -> None:
    assert OptimizerSettings(name="adamw", betas=[0.9, 0.99]).betas == [0.9, 0.99]
    assert OptimizerSettings(momentum=0.9, nesterov=True).momentum == 0.9
    assert DataSettings(text="x").name is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([""], "the first item is the program to run, and it is empty"),
        (["true", "a\0b"], "must not contain a zero byte"),
        (["true", "x" * MAX_STRING_BYTES], f"must be shorter than {MAX_STRING_BYTES} bytes"),
    ],
)
def test_a_command_that_the_kernel_would_not_start_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CommandSettings(argv=argv)
    assert CommandSettings(argv=["true", "", "x" * (MAX_STRING_BYTES - 1)]).argv[1] == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"env": {"": "a"}},
            "the name of a variable may have only letters, digits and _, and must not begin with a digit, got ''",
        ),
        ({"env": {"BAD NAME": "a"}}, "the name of a variable may have only letters, .*, got 'BAD NAME'; correct it"),
        ({"env": {"1ST": "a"}}, "the name of a variable may have only letters, .*, got '1ST'"),
        ({"threads_per_rank": 1025}, "less than or equal to 1024"),
        ({"env": {"A=B": "a"}}, "got 'A=B'"),
        ({"env": {"A\0": "a"}}, "letters, digits and _"),
        ({"env": {"A": "a\0"}}, "must not contain a zero byte"),
        ({"env": {"A": "x" * (MAX_STRING_BYTES - 2)}}, f"A: .* shorter than {MAX_STRING_BYTES} bytes"),
        ({"nodes": 100_001}, "less than or equal to 100000"),
        ({"ranks_per_node": 1025}, "less than or equal to 1024"),
        ({"start_timeout_s": float("inf")}, "finite number"),
        ({"rendezvous_timeout_s": 0}, "greater than 0"),
        ({"rendezvous_timeout_s": 60, "kind": "bench"}, "is for command: jobs; the ranks of a bench: job have start_"),
        ({"grace_s": float("inf")}, "finite number"),
    ],
)
def test_a_job_that_could_not_be_started_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Job(**{"kind": "command", "settings": CommandSettings(argv=["true"]), **keys})


def test_the_longest_value_that_passes_is_one_that_the_kernel_takes() -> None:
    value = "x" * (MAX_STRING_BYTES - 3)  # A= before it and a zero after it
    job = Job(kind="command", settings=CommandSettings(argv=["true"]), env={"A": value})
    assert subprocess.run(["true"], env=job.env, executable=shutil.which("true"), check=False).returncode == 0
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["true"], env={"A": value + "x"}, executable=shutil.which("true"), check=False)
