"""Pieces that are forwarded again, or compiled, compute what the layers do; what they keep is less."""

import copy
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.machine import compilers
from muster.jobs.models.shapes import POOL, GptShape, VggShape
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import move
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.models.vgg import build_vgg
from muster.jobs.train.numerics import Numerics, pieces
from muster.jobs.train.numerics.pieces import cut, require_compiler
from muster.jobs.train.trainer import build_trainer
from muster.jobs.world.world import World

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GPT = GptShape("tiny", d_model=16, d_ff=32, layers=3, heads=2, context=8, vocabulary=11, dropout=0.2)
VGG = VggShape("vgg-tiny", (8, POOL, 8, 8, POOL, 16, POOL, 16, POOL, 16, POOL))


def model_of(kind: str) -> LayerStack:
    return build_gpt(GPT, seed=1) if kind == "gpt" else build_vgg(VGG, seed=1)


def batch_of(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if kind == "gpt":
        tokens = torch.randint(11, (4, 8), generator=generator)
        return tokens, tokens.roll(-1, 1)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(10, (4,), generator=generator)


def trained(kind: str, numerics: Numerics) -> tuple[LayerStack, float, int]:
    """Forward and backward once; return the model with its gradients, the loss, and the bytes kept in between."""
    model, kept = numerics.place(model_of(kind)), 0
    inputs, targets = batch_of(kind)

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
        return tensor

    torch.manual_seed(5)  # the engine seeds every micro-batch
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = numerics.loss(model, inputs.to(numerics.inputs) if kind == "vgg" else inputs, targets)
    loss.backward()
    return model, float(loss.detach()), kept


def same(one: LayerStack, other: LayerStack) -> list[str]:
    """Name the parameters whose gradients differ, and the buffers that do."""
    other_parameters, other_buffers = dict(other.named_parameters()), dict(other.named_buffers())
    return [
        *(name for name, each in one.named_parameters() if not torch.equal(each.grad, other_parameters[name].grad)),
        *(name for name, each in one.named_buffers() if not torch.equal(each, other_buffers[name])),
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
@pytest.mark.parametrize("kind", ["gpt", "vgg"])
def test_forwarding_again_changes_no_bit_and_keeps_less(kind, precision):
    # The GPT has dropout, which must draw the same; the VGG batch norms, which must not record twice.
    plain, loss, kept = trained(kind, Numerics(precision, CPU))
    again, same_loss, kept_again = trained(kind, Numerics(precision, CPU, recompute=True))
    assert loss == same_loss
    assert same(plain, again) == []
    assert kept_again < 0.6 * kept
    if kind == "vgg":
        assert int(again.get_buffer("norm1.num_batches_tracked")) == 1
        assert float(again.get_buffer("norm1.running_mean").abs().sum()) > 0.0


def test_batch_norms_that_do_not_track_do_not_when_forwarded_again():
    model = Numerics("fp32", CPU, recompute=True).place(model_of("vgg"))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False  # as of every virtual rank but the first
    before = [buffer.clone() for buffer in model.buffers()]
    model(*batch_of("vgg")).backward()
    assert all(torch.equal(*pair) for pair in zip(before, model.buffers(), strict=True))


def test_a_body_is_cut_before_each_convolution_and_each_block():
    names = [name for name, _ in model_of("vgg").named_children()]
    vgg = [" ".join(names[piece.start : piece.stop]) for piece in cut(list(model_of("vgg"))[:-1])]
    assert vgg[:3] == ["conv1 norm1 relu1 pool1", "conv2 norm2 relu2", "conv3 norm3 relu3 pool2"]
    assert vgg[-1].endswith("flatten")
    gpt = cut(list(model_of("gpt"))[:-1])
    assert [(piece.start, piece.stop, piece.again) for piece in gpt] == [
        *[(0, 1, False), (1, 2, True), (2, 3, True), (3, 4, True), (4, 5, False)]
    ]


@pytest.mark.parametrize("kind", ["gpt", "vgg"])
def test_a_copy_of_a_prepared_model_is_a_model_of_its_own(kind):
    numerics = Numerics("fp32", CPU, recompute=True)
    model = numerics.place(model_of(kind))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin(*batch_of(kind)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert list(twin.state_dict()) == list(model_of(kind).state_dict()), "names are those of the plain model"


@pytest.mark.filterwarnings("ignore")  # the tracer asks tensors for what they warn of
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["gpt", "vgg"])
def test_compiled_pieces_compute_what_the_layers_do(kind, recompute, monkeypatch):
    # Traced and differentiated as by the real compiler, without its minute of C++; that is the next test.
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(pieces.torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    model, loss, _ = trained(kind, Numerics("fp32", CPU, compile=True, recompute=recompute))
    plain, wanted, _ = trained(kind, Numerics("fp32", CPU))
    assert loss == wanted
    assert same(model, plain) == []
    once = {"gpt": 4, "vgg": 7}[kind]  # embed, one block for all three, norm, loss; six convolutions, loss
    again = {"gpt": 1, "vgg": 6}[kind] if recompute else 0
    assert once <= len(graphs) <= once + again
    model.eval()
    with torch.no_grad():
        model(batch_of(kind)[0])
    assert len(graphs) <= once + again, "evaluation runs the layers as they are"


def compiled_losses(world: World) -> list[list[float]]:
    """Train three steps in two modes, plain and compiled; return the losses."""
    warnings.simplefilter("ignore")
    pieces.torch.compile = partial(torch.compile, backend=lambda graph, example: graph.forward)
    model = {"d_model": 16, "d_ff": 32, "layers": 2, "heads": 2, "context": 8}
    found = []
    for mode in ("ddp", "bucketed"):
        for compile in (False, True):
            job = {"model": model, "data": "synthetic", "batch_size": 16, "steps": 3, "mode": mode, "compile": compile}
            settings = TrainSettings.model_validate({**job, "activation_checkpointing": True})
            trainer = build_trainer(settings, open_data(settings), world)
            steps = trainer.own_steps()
            works = [move(steps[number], world.device, trainer.dtype).shards for number in range(3)]
            found.append([float(trainer.engine.train_step(n, work)[0]) for n, work in enumerate(works)])
    return found


@pytest.mark.ranks
def test_compiled_pieces_train_within_wrappers(on_ranks):
    # PyTorch's wrapper has the tracer cut what it finds within its forward; ours hangs hooks on parameters.
    for losses in on_ranks(2, compiled_losses):
        assert losses[0] == losses[1]
        assert losses[2] == losses[3]
        assert losses[0] == losses[2]


@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_code_generated_for_the_cpu_agrees(precision):
    require_compiler(CPU)
    compiled, loss, _ = trained("vgg", Numerics(precision, CPU, compile=True))
    plain, wanted, _ = trained("vgg", Numerics(precision, CPU))
    assert loss == pytest.approx(wanted, rel=1e-5 if precision == "fp32" else 1e-2)
    largest = max(float(each.grad.abs().max()) for each in plain.parameters())
    for name, each in plain.named_parameters():
        difference = float((each.grad.float() - compiled.get_parameter(name).grad.float()).abs().max())
        assert difference < (1e-4 if precision == "fp32" else 5e-2) * largest, name


def test_a_machine_without_a_compiler_is_told_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RefusedError, match=r"train.compile: .* needs a compiler, but none of g\+\+, clang\+\+ is installed"
    ):
        Numerics("fp32", CPU, compile=True).place(model_of("gpt"))
    tool = tmp_path / "g++"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setattr(compilers.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(RefusedError, match=r"needs Python's headers, .*Python\.h does not exist"):
        require_compiler(CPU)
    Path(tmp_path, "Python.h").touch()
    require_compiler(CPU)
