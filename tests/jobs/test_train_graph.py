"""What a job file may not ask of `cuda_graph`, and is told at once."""

from typing import Any

import pytest

from muster.jobs.spec.recorded import records, why_eager
from muster.jobs.spec.train import TrainSettings

GPT = {"model": "gpt-nano", "data": "synthetic", "mode": "bucketed", "cuda_graph": True}


def parallel(**split: Any) -> dict[str, Any]:
    return {"mode": None, "parallel": split}


def settings(**more: Any) -> TrainSettings:
    return TrainSettings.model_validate({**GPT, **more})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"device": "cpu"}, "cuda_graph needs a CUDA device, but device is cpu; remove one of them"),
        ({"mode": "ddp"}, "cuda_graph cannot be combined with ddp: .*; choose mode bucketed"),
        ({"mode": "gather_scatter"}, "cuda_graph cannot be combined with gather_scatter: .*; choose mode bucketed"),
        ({"mode": "zero3"}, "cuda_graph cannot be combined with zero3: .*; choose mode bucketed"),
        ({"mode": "fsdp"}, "cuda_graph cannot be combined with fsdp: .*; choose mode bucketed"),
        ({"mode": "terapipe"}, "cuda_graph cannot be combined with terapipe: the host cuts micro-batches"),
        ({"optimizer": {"make": "own:Sgd"}}, "cuda_graph cannot be combined with optimizer own:Sgd: its step may need"),
        (
            {"mode": "1f1b", "activation_checkpointing": True},
            "cuda_graph cannot be combined with activation_checkpointing: a recorded graph keeps its memory",
        ),
        (parallel(data=2, sync="ddp"), "cuda_graph cannot be combined with ddp"),
        (
            parallel(data=2, pipe=2, zero=1),
            "cuda_graph cannot be combined with data-parallel pipelines, unless gradients are averaged in place: hooks",
        ),
        (
            parallel(tensor=2, pipe=2),
            "cuda_graph cannot be combined with tensor parallel within a pipeline: the graphs of different",
        ),
        (
            {"mode": "1f1b", "exact": True},
            "cuda_graph cannot be combined with exact if the head and the embedding share their weight: ",
        ),
    ],
)
def test_what_the_host_decides_within_a_step_is_refused_with_what_to_do(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**more)
    assert settings(**{**more, "cuda_graph": False}).cuda_graph is False
    eager = settings(**{**more, "cuda_graph": "auto"})
    assert not records(eager, "cpu")
    if more.get("device") != "cpu":
        assert not records(eager, "cuda")
        assert why_eager(eager)


def test_auto_is_the_default_and_records_on_gpus_only() -> None:
    more = {key: value for key, value in GPT.items() if key != "cuda_graph"}
    own = TrainSettings.model_validate(more)
    assert own.cuda_graph == "auto"
    assert (records(own, "cuda"), records(own, "cpu"), why_eager(own)) == (True, False, "")


@pytest.mark.parametrize("more", [{"model": {"make": "own:model"}}, {"loss": "own:loss"}])
def test_auto_runs_the_python_of_a_user_and_says_so(more: dict[str, Any]) -> None:
    own = settings(**more, cuda_graph="auto")
    assert not records(own, "cuda")
    assert "names your own code, whose Python a replay would skip" in why_eager(own)
    assert records(settings(**more), "cuda")


def test_forwards_and_backwards_of_a_pipeline_can_be_recorded() -> None:
    assert settings(**parallel(data=2, pipe=2)).cuda_graph
    for more in ({"mode": "1f1b"}, {"mode": "zb1p", "precision": "bf16"}, {"mode": "zbv", "microbatches": 3}):
        assert settings(**more).cuda_graph
    untied = {"name": "gpt-nano", "tied": False}
    assert settings(mode="zb1p", exact=True, model=untied).cuda_graph


@pytest.mark.parametrize("mode", ["single", "allreduce", "flat", "overlap", "bucketed", "zero1", "zero2", "tensor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure_bf16"])
def test_all_else_can_be_recorded(mode: str, precision: str) -> None:
    assert settings(mode=mode, precision=precision, compile=True, grad_accumulation=2).cuda_graph


@pytest.mark.parametrize("more", [{"exact": True}, {"model": {"name": "gpt-nano", "dropout": 0.1}}])
@pytest.mark.parametrize("mode", ["bucketed", "zero1", "zero2"])
def test_virtual_ranks_and_dropout_can_be_recorded(mode: str, more: dict[str, Any]) -> None:
    assert settings(mode=mode, **more).cuda_graph is True
