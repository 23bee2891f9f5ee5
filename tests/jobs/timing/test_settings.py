"""What a `timing:` section asks for: its rows, and the training that each of them stands for."""

import re

import pytest
from pydantic import ValidationError

from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.timing.settings import Case, TimingSettings


def settings(**values: object) -> TimingSettings:
    return TimingSettings.model_validate(values)


def test_rows_go_model_by_model_each_once_passes_running_fastest():
    asked = settings(model=["vgg11", "gpt-nano", "vgg11"], passes=["step", "forward"], precision=["fp32", "bf16"])
    assert [(case.model, case.precision, case.pass_name) for case in asked.cases()] == [
        (model, precision, pass_name)
        for model in ("vgg11", "gpt-nano")
        for precision in ("fp32", "bf16")
        for pass_name in ("step", "forward")
    ]


def test_all_is_every_model_that_has_a_name():
    assert settings(model="all").models() == [*VGG_SHAPES, *GPT_SHAPES]


def test_a_row_is_trained_as_a_job_with_the_same_settings_would():
    asked = settings(model="gpt-nano", norm="layer", bias=True, tied=False, vocabulary=300, context=32, batch=2)
    training = asked.training(Case("gpt-nano", "step", "bf16"))
    assert training.mode == "single"
    assert (training.precision, training.batch_size, training.optimizer.name) == ("bf16", 2, "adamw")
    shape = asked.shape(Case("gpt-nano", "step", "bf16"))
    assert (shape.norm, shape.bias, shape.tied, shape.vocabulary, shape.context) == ("layer", True, False, 300, 32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "gpt-nanno"}, "unknown model 'gpt-nanno'; did you mean 'gpt-nano'?"),
        ({"model": ["vgg11", "vgg16"], "context": 64}, "context is for GPTs, but none is timed"),
        ({"model": "vgg11", "tied": False}, "tied is for GPTs, but none is timed"),
        ({"model": "gpt-nano", "steps": 0}, "greater than or equal to 1"),
        ({"model": "gpt-nano", "warmup": -1}, "greater than or equal to 0"),
        ({"model": []}, "no model is named; add model: with names, or train: with a section"),
        ({"model": "rms_fused"}, "unknown model 'rms_fused' (valid: all, vgg11, "),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        settings(**values)


def test_a_model_is_timed_on_one_rank():
    settings(model="vgg11").check_world(1)
    with pytest.raises(RefusedError, match="on one rank, but this job has 2"):
        settings(model="vgg11").check_world(2)


def test_what_is_written_down_can_be_read_again_for_images_too():
    asked = settings(model="vgg11", passes="forward")
    assert TimingSettings.model_validate_json(asked.model_dump_json()) == asked


OWN = {
    "model": {"make": "net.py:build", "args": {"width": 8}},
    "data": "digits",
    "loss": "net.py:loss",
    "optimizer": {"name": "sgd", "lr": 0.5},
    "mode": "zero3",
    "clip_norm": 1.0,
}


def test_the_model_of_a_train_section_is_one_row_more_with_its_data_loss_and_optimizer():
    asked = settings(model="vgg11", train=OWN, passes="step", batch=3, seed=5)
    assert settings(**asked.model_dump(mode="json")) == asked
    built_in, own = asked.cases()
    assert [built_in.is_own, own.is_own, own.model] == [False, True, "net.py:build"]
    training = asked.training(own)
    assert (training.model.args, training.loss, training.optimizer.lr) == ({"width": 8}, "net.py:loss", 0.5)
    assert (training.mode, training.clip_norm, training.batch_size, training.seed) == ("single", None, 3, 5)
    assert asked.makes == {"train.model.make": "net.py:build", "train.loss": "net.py:loss"}
    for wrong, message in (
        ({"train": OWN | {"model": {"make": "net"}}}, "must be FILE.py:NAME or package.module:NAME, got 'net'"),
        ({"train": OWN, "dtypes": True}, "dtypes is for built-in models"),
    ):
        with pytest.raises(ValidationError, match=re.escape(message)):
            settings(**wrong)
