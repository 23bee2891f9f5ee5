"""Head and cross-entropy by chunks against the two written one after the other."""

import sys
from unittest.mock import ANY

import pytest
import torch
from torch import nn

from muster.jobs.machine import compilers
from muster.jobs.spec.train_fields import ModelSettings
from muster.jobs.train.kernels.rms_norm import why_no_triton
from muster.jobs.train.models import build_model
from muster.jobs.train.models.stack import plain_loss
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics import loss as losses
from muster.jobs.train.numerics.loss import chunked_loss, row_gradients, row_gradients_by_comparing

CPU = torch.device("cpu")
CLASSES = 50
# Relative to the largest element; float32 inside, so float64 is no better.
WITHIN = {torch.float64: 1e-6, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("rows", [1, 7, 36, 1000])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", WITHIN)
def test_loss_and_gradients_are_those_of_a_head_and_a_cross_entropy(dtype, bias, rows):
    torch.manual_seed(0)
    head = nn.Linear(16, CLASSES, bias=bias).to(dtype)
    x, targets = torch.randn(4, 9, 16).to(dtype).requires_grad_(), torch.randint(CLASSES, (4, 9))
    found = []
    chunk_bytes = rows * CLASSES * dtype.itemsize
    for loss in (plain_loss(head, x, targets), chunked_loss(head, x, targets, chunk_bytes=chunk_bytes)):
        head.zero_grad(set_to_none=True)
        x.grad = None
        (3.0 * loss).backward()  # what accumulation does
        found.append([loss.detach(), x.grad, *(each.grad for each in head.parameters())])
    for wanted, mine in zip(*([each.double() for each in way] for way in found), strict=True):
        assert float((wanted - mine).abs().max()) <= WITHIN[dtype] * float(wanted.abs().max())
    assert found[1][0].dtype == torch.float32
    assert found[1][1].dtype == dtype


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("ignored", [0, 20, 36])
def test_ignored_targets_have_neither_loss_nor_gradient(ignored, compile, monkeypatch):
    monkeypatch.setattr(losses, "compiled_kernel", lambda: row_gradients_by_comparing)  # its arithmetic, uncompiled
    torch.manual_seed(0)
    head, x, targets = nn.Linear(16, CLASSES), torch.randn(36, 16, requires_grad=True), torch.randint(CLASSES, (36,))
    targets[:ignored] = -100
    mine = chunked_loss(head, x, targets, compile=compile, chunk_bytes=7 * CLASSES * 4)
    found = torch.autograd.grad(mine, [x, head.weight, head.bias])
    if ignored == len(targets):
        assert [mine.item(), *(each.abs().max().item() for each in found)] == [0.0] * 4
        return
    wanted = plain_loss(head, x, targets)
    assert torch.allclose(mine, wanted)
    for own, each in zip(found, torch.autograd.grad(wanted, [x, head.weight, head.bias]), strict=True):
        assert torch.allclose(own, each, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compile", [True, False])
def test_a_padded_vocabulary_changes_neither_loss_nor_gradients(compile, bias, monkeypatch):
    # The padding would win: without -inf, a row's largest logit would be that of an added class.
    monkeypatch.setattr("muster.jobs.train.numerics.loss.compiled_kernel", lambda: row_gradients_by_comparing)
    head, x, targets = nn.Linear(16, CLASSES, bias=bias), torch.randn(9, 16), torch.randint(CLASSES, (9,))
    nn.init.constant_(head.weight, -1.0)
    x = x.abs().requires_grad_()
    found = []
    for multiple in (1, 64):
        loss = chunked_loss(head, x, targets, compile=compile, chunk_bytes=4 * 4 * 64, multiple=multiple)
        found.append([loss.detach(), *torch.autograd.grad(loss, [x, *head.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_both_ways_to_write_a_chunk_s_gradient_are_one():
    logits, targets = torch.randn(6, CLASSES), torch.randint(CLASSES, (6,))
    found = [(way(mine := logits.clone(), targets), mine) for way in (row_gradients, row_gradients_by_comparing)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_without_gradients_none_are_made():
    head, x, targets = nn.Linear(8, CLASSES), torch.randn(5, 8), torch.zeros(5, dtype=torch.int64)
    with torch.no_grad():
        loss = chunked_loss(head, x, targets)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(plain_loss(head, x, targets).detach()), rel=1e-6)


def test_the_largest_tensor_of_a_bf16_step_is_a_chunk_and_not_the_logits(monkeypatch):
    # 64 x 8 tokens x 300 classes; a chunk has 16 rows.
    monkeypatch.setattr("muster.jobs.train.numerics.loss.CHUNK_BYTES", 16 * 300 * 2)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for each in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(each, torch.Tensor) and each.dim() and each.shape[-1] == 300:
                    largest = max(largest, each.numel())
            return result

    settings = ModelSettings(d_model=16, d_ff=32, layers=1, heads=2, context=8, vocabulary=300)
    tokens = torch.randint(300, (64, 8))
    for chunked, wanted in ((True, 16 * 300), (False, 64 * 8 * 300)):
        numerics = Numerics("bf16", CPU, chunked=chunked)
        model = numerics.place(build_model(settings, vocabulary=300, seed=0))
        largest = 0
        with Watch():
            numerics.loss(model, tokens, tokens).backward()
        assert largest == wanted


def test_without_a_compiler_a_gpu_s_loss_does_not_need_triton(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    for names, fused in (("no-such-compiler",), False), ((sys.executable,), True):
        monkeypatch.setitem(compilers.COMPILERS, "cuda", names)
        why_no_triton.cache_clear()
        losses.is_fused.cache_clear()
        assert losses.is_fused("cuda") == fused
        assert losses.kernel_of("cuda", compile=False) == ((row_gradients, losses.CHUNK_BYTES) if not fused else ANY)
        assert not losses.is_fused("cpu")
    why_no_triton.cache_clear()
    losses.is_fused.cache_clear()
