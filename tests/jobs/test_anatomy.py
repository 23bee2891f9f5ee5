"""The parts of a model, against the modules that are trained."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from muster.collectives_bench.cost.modes import WAYS, chunks_of
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.shapes import GPT_SHAPES, POOL, VGG_SHAPES, GptShape, VggShape
from muster.jobs.train.models.gpt import assemble_gpt
from muster.jobs.train.models.vgg import assemble_vgg
from muster.jobs.train.numerics.pieces import cut
from muster.jobs.train.parallel.cutting import cuts_of
from muster.jobs.world.world import World
from muster.pipe.boundaries import weights_of
from muster.pipe.schedules.cuts import balanced_ranks
from muster.pipe.schedules.tables import SCHEDULES

BATCH = 2
ALONE, BY_FLOPS = World(0, 1, None, torch.device("cpu")), SimpleNamespace(cut="flops")
NANO = GPT_SHAPES["gpt-nano"]
SMALL_VGG = VggShape("small", (8, POOL, 8, POOL, 16, 16, POOL, 16, POOL, 16, POOL), classes=7)
SHAPES = [SMALL_VGG, NANO, replace(NANO, tied=False, bias=True, norm="layer", vocabulary=300)]
CLASSIFIERS = [replace(SMALL_VGG, hidden=(24, 20)), replace(SMALL_VGG, hidden=(24,), side=3)]
IDS = ["vgg", "gpt", "gpt with all there is", "vgg with a classifier", "vgg resized"]


def module_of(shape: VggShape | GptShape) -> nn.Sequential:
    return assemble_vgg(shape) if isinstance(shape, VggShape) else assemble_gpt(shape)


def loss_of(shape: VggShape | GptShape, model: nn.Module) -> torch.Tensor:
    is_vgg = isinstance(shape, VggShape)
    inputs = torch.randn(BATCH, 3, 32, 32) if is_vgg else torch.zeros(BATCH, shape.context, dtype=torch.long)
    outputs = model(inputs).flatten(0, -2)
    return nn.functional.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.long))


@pytest.mark.parametrize("name", [*VGG_SHAPES, *GPT_SHAPES])
def test_parameters_are_those_of_the_module_in_its_order(name):
    shape = {**VGG_SHAPES, **GPT_SHAPES}[name]
    with torch.device("meta"):
        model = module_of(shape)
    wanted = [(each, tuple(parameter.shape)) for each, parameter in model.named_parameters()]
    found = anatomy(shape)
    assert [(tensor.name, tensor.shape) for tensor in found.tensors] == wanted
    assert found.elements == shape.parameter_count()
    assert [name for name, _ in found.layers()] == [each for each, layer in model.named_children() if each != "flatten"]
    assert found.buffers == sum(each.numel() for each in model.buffers() if each.is_floating_point())


@pytest.mark.parametrize("shape", [*SHAPES, *CLASSIFIERS], ids=IDS)
def test_gradients_become_ready_in_the_order_of_autograd(shape):
    model, order = module_of(shape), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    loss_of(shape, model).backward()
    ready = anatomy(shape).ready()
    assert [tensor.name for tensor, _ in ready] == order
    shares = [share for _, share in ready]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("shape", [*SHAPES, *CLASSIFIERS], ids=IDS)
def test_what_the_forward_keeps_is_what_autograd_saves(shape):
    model, kept = module_of(shape), {}
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(shape, model)
    measured = sum(storage.nbytes() for storage in kept.values())
    assert loss.requires_grad
    # Batch norm keeps two numbers a channel besides, whatever the batch.
    assert BATCH * anatomy(shape).saved_bytes(4) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("shape", [*SHAPES[:2], *CLASSIFIERS], ids=[*IDS[:2], *IDS[3:]])
def test_what_is_forwarded_again_are_the_trainings_own_pieces_with_their_inputs(shape):
    model, given = module_of(shape), {}
    for name, layer in model.named_children():
        layer.register_forward_pre_hook(lambda _, inputs, name=name: given.update({name: inputs[0].numel() // BATCH}))
    loss_of(shape, model)
    names = list(given)
    pieces = [piece for piece in cut(list(model)[:-1]) if piece.again]
    wanted = [(names[piece.start], given[names[piece.start]]) for piece in pieces]
    assert [(again.parts[0].layer, again.inputs) for again in anatomy(shape).recomputed()] == wanted


@pytest.mark.parametrize("shape", [*SHAPES[:2], *CLASSIFIERS], ids=[*IDS[:2], *IDS[3:]])
def test_work_is_what_torch_counts_in_products(shape):
    from torch.utils.flop_counter import FlopCounterMode

    model, found = module_of(shape), anatomy(shape)
    products = [
        part for part in found.parts if part.tensors and len(part.tensors[0].shape) > 1 and part.layer != "embed"
    ]
    products += [part for part in found.parts if part.repeats > 1]
    with FlopCounterMode(display=False) as counter:
        loss = loss_of(shape, model)
    forward = BATCH * sum(part.flops for part in products)
    # torch counts attention's masked half too, or not at all where its own kernel does it.
    assert counter.get_total_flops() == pytest.approx(forward, rel=0.05 if isinstance(shape, VggShape) else 0.2)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    backward = BATCH * sum(part.backward_flops for part in products)
    assert counter.get_total_flops() == pytest.approx(backward, rel=0.05 if isinstance(shape, VggShape) else 0.2)


def test_units_hold_every_part_once():
    for shape in (*SHAPES, *CLASSIFIERS):
        found = anatomy(shape)
        parts = [part.name for unit in found.units() for part in unit]
        assert sorted(parts) == sorted(part.name for part in found.parts)
    assert len(anatomy(NANO).units()) == 1 + NANO.layers


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv"])
@pytest.mark.parametrize("shape", [VGG_SHAPES["vgg11"], replace(NANO, layers=2), replace(NANO, layers=6)])
def test_predicted_stages_are_those_of_the_module(name, shape):
    """The rule for equally good cuts matters, because embeddings and norms count as no work."""
    with torch.device("meta"):
        model = module_of(shape)
    schedule, layers = WAYS[name].schedule, [each for each, _ in model.named_children()]
    inputs = (BATCH, 3, 32, 32) if isinstance(shape, VggShape) else (BATCH, shape.context)
    cuts = balanced_ranks(weights_of(model, "flops", inputs), SCHEDULES[name].rank_of(2, schedule.chunks))
    assert cuts_of(BY_FLOPS, model, SCHEDULES[name].rank_of(2, schedule.chunks), inputs, ALONE) == cuts
    stages = [set(layers[begin:end]) - {"flatten"} for begin, end in pairwise((*cuts, None))]
    assert [{part.layer for part in chunk} for chunk in chunks_of(anatomy(shape), schedule, 2)] == stages
