"""Precisions, masters, compiled pieces and the loss by chunks on a CUDA device. `pytest -m gpu`."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muster.jobs.models.shapes import POOL, GptShape, VggShape
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data.loading import MicroInput, ShardInput
from muster.jobs.train.engine import Engine, build_engine
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.stack import LayerStack, plain_loss
from muster.jobs.train.models.vgg import build_vgg
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.loss import chunked_loss
from muster.jobs.train.numerics.pieces import require_compiler
from muster.jobs.train.profiling.clock import clock_for
from muster.jobs.world.world import World

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

CUDA = torch.device("cuda", 0)
GPT = GptShape("tiny", 128, 512, 3, 2, context=64, vocabulary=512, tied=False, bias=True, norm="layer")
VGG = VggShape("tiny", (32, POOL, 32, POOL, 64, POOL, 64, POOL, 64, POOL))
OPTIMIZER = {"gpt": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}, "vgg": {"lr": 0.02, "momentum": 0.9}}
# Of the first loss, and of the gradients.
WITHIN = {"fp64": 1e-2, "bf16": 0.1, "fp16": 0.03, "pure_bf16": 0.1}  # convolutions in fp32 may use TF32


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def model_of(kind: str) -> LayerStack:
    return build_gpt(GPT, seed=1) if kind == "gpt" else build_vgg(VGG, seed=1)


def batch_of(kind: str, numerics: Numerics, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind == "gpt":
        tokens = torch.randint(512, (8, 64), generator=generator).to(CUDA)
        return tokens, tokens.roll(-1, 1)
    images = torch.randn(32, 3, 32, 32, generator=generator)
    return images.to(CUDA, numerics.inputs), torch.randint(10, (32,), generator=generator).to(CUDA)


def gradients(kind: str, numerics: Numerics) -> tuple[float, dict[str, Tensor], int]:
    """Forward and backward once; return the loss, the gradients and the most bytes in use."""
    model = numerics.place(model_of(kind))
    inputs, targets = batch_of(kind, numerics)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loss = numerics.loss(model, inputs, targets)
    loss.backward()
    found = {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return float(loss.detach()), found, torch.cuda.max_memory_allocated()


def require_close(found: dict[str, Tensor], wanted: dict[str, Tensor], within: float) -> None:
    """Compare all gradients as one vector: a flipped maximum of a pool is a jump in a few of its elements."""
    apart = torch.stack([(found[name] - each).norm() for name, each in wanted.items()]).norm()
    length = torch.stack([each.norm() for each in wanted.values()]).norm()
    assert float(apart) <= within * float(length)
    assert all(bool(torch.isfinite(each).all()) for each in found.values())


@pytest.mark.parametrize("kind", ["gpt", "vgg"])
@pytest.mark.parametrize("precision", WITHIN)
def test_every_precision_is_near_float32(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions in fp32 would round to 10 bits
    loss, found, _ = gradients(kind, Numerics(precision, CUDA))
    wanted_loss, wanted, _ = gradients(kind, Numerics("fp32", CUDA))
    assert loss == pytest.approx(wanted_loss, rel=WITHIN[precision])
    require_close(found, wanted, WITHIN[precision])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
@pytest.mark.parametrize("kind", ["gpt", "vgg"])
def test_forwarding_again_gives_the_same_gradients(kind: str, precision: str) -> None:
    plain = Numerics(precision, CUDA)
    loss, wanted, _ = gradients(kind, plain)
    again, found, _ = gradients(kind, replace(plain, recompute=True))
    assert again == loss
    require_close(found, wanted, 1e-5 if precision == "fp32" else 1e-2)  # atomics may add in another order


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
@pytest.mark.parametrize("kind", ["gpt", "vgg"])
def test_compiled_pieces_agree(kind: str, precision: str, recompute: bool) -> None:
    require_compiler(CUDA)
    torch._dynamo.reset()
    plain = Numerics(precision, CUDA)
    loss, wanted, _ = gradients(kind, plain)
    compiled, found, _ = gradients(kind, replace(plain, compile=True, recompute=recompute))
    assert compiled == pytest.approx(loss, rel=1e-4 if precision == "fp32" else 1e-2)
    require_close(found, wanted, 1e-2 if precision == "fp32" else 0.1)


def test_the_loss_by_chunks_computes_the_same() -> None:
    plain = Numerics("pure_bf16", CUDA)
    loss, wanted, _ = gradients("gpt", plain)
    other, found, _ = gradients("gpt", replace(plain, chunked=False))
    assert other == pytest.approx(loss, rel=1e-2)
    require_close(found, wanted, 0.1)


@pytest.mark.parametrize("compile", [False, True])
def test_the_loss_by_chunks_needs_less_memory_than_the_logits(compile: bool) -> None:
    head = torch.nn.Linear(64, 50304).to(CUDA, torch.bfloat16)
    x = torch.randn(8192, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50304, (8192,), device=CUDA)
    peaks, results = [], []
    for chunked in (False, True):
        head.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        if chunked:
            loss = chunked_loss(head, x, targets, compile=compile, chunk_bytes=2**26)
        else:
            loss = plain_loss(head, x, targets)
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - begin)
        results.append([loss.detach().double(), x.grad.double(), *(each.grad.double() for each in head.parameters())])
    assert peaks[1] < 0.25 * peaks[0]
    for found, wanted in zip(results[1], results[0], strict=True):
        assert float((found - wanted).abs().max()) <= 2e-2 * float(wanted.abs().max())


def engine_of(kind: str, precision: str, clip_norm: float | None = 1.0, **more: bool) -> tuple[Engine, Numerics]:
    model = "gpt-nano" if kind == "gpt" else "vgg11"
    settings = TrainSettings.model_validate(
        {
            "model": model,
            "data": "synthetic",
            "mode": "single",
            "cuda_graph": False,  # ranks that record a step exchange a number
            "precision": precision,
            "optimizer": OPTIMIZER[kind],
            "clip_norm": clip_norm,
            **more,
        }
    )
    numerics = Numerics(settings.precision, CUDA, recompute=settings.activation_checkpointing)
    world = World(0, 1, None, CUDA)
    return build_engine(settings, numerics.place(model_of(kind)), world, clock_for(CUDA), numerics), numerics


def step(engine: Engine, kind: str, numerics: Numerics, number: int) -> list[Tensor]:
    inputs, targets = batch_of(kind, numerics, number)
    shard = ShardInput(0, (MicroInput(inputs, targets, len(inputs), 1.0),))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises
    try:
        return engine.train_step(number, [shard])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "fp16", "pure_bf16"])
@pytest.mark.parametrize("kind", ["gpt", "vgg"])
def test_no_step_waits_for_the_device_and_each_learns(kind: str, precision: str, again: bool) -> None:
    engine, numerics = engine_of(kind, precision, activation_checkpointing=again)
    losses = [float(step(engine, kind, numerics, 0)[0]) for _ in range(12)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["gpt", "vgg"])
def test_an_infinite_gradient_leaves_the_step_out(kind: str) -> None:
    engine, numerics = engine_of(kind, "fp16", clip_norm=None)
    parameter = next(engine.module.parameters())
    handle = parameter.register_hook(lambda gradient: gradient + float("inf"))
    before = [each.detach().clone() for each in engine.module.parameters()]
    step(engine, kind, numerics, 0)
    figures = {name: float(value) for name, value in engine.scaler.row().items()}
    assert figures == {"loss_scale": 32768.0, "skipped": 1.0}
    assert all(torch.equal(old, new) for old, new in zip(before, engine.module.parameters(), strict=True))
    assert not any(value.any() for state in engine.optimizer.state.values() for value in state.values())
    handle.remove()
    step(engine, kind, numerics, 0)
    assert {name: float(value) for name, value in engine.scaler.row().items()} == {
        "loss_scale": 32768.0,
        "skipped": 0.0,
    }
    assert not torch.equal(before[0], parameter)


def test_masters_on_cuda_are_stepped_as_by_hand() -> None:
    engine, numerics = engine_of("gpt", "pure_bf16", clip_norm=None)
    by_hand = [torch.nn.Parameter(each.detach().float()) for each in engine.module.parameters()]
    plain = torch.optim.AdamW(by_hand, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for number in range(3):
        step(engine, "gpt", numerics, number)
        for mine, low in zip(by_hand, engine.module.parameters(), strict=True):
            mine.grad = low.grad.float()
        plain.step()
    for mine, low in zip(by_hand, engine.module.parameters(), strict=True):
        assert torch.equal(engine.optimizer.state[low]["master"], mine)
        assert torch.equal(low, mine.bfloat16())
