"""A one-process pipeline computes what the module computes, with one thread per stage, and stages overlap."""

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import build_gpt
from muster.pipe import Pipe
from muster.pipe.local.pipe import clock_cycles, split_module
from support.local_pipes import PATIENCE_S, Doing, mlp, pipe_of


class Meeting(nn.Module):
    """In chosen micro-batches, waits until the other stage is running too, and records which threads were there."""

    def __init__(self, barrier: threading.Barrier, seen: list[Any], meets: Callable[[int], bool]) -> None:
        super().__init__()
        self.barrier, self.seen, self.meets, self.calls = barrier, seen, meets, 0

    def forward(self, x: Tensor) -> Tensor:
        microbatch, self.calls = self.calls, self.calls + 1
        self.seen.append((threading.get_ident(), int(x[0, 0])))
        if self.meets(microbatch):
            self.barrier.wait(PATIENCE_S)
        return x.clone()


class Both(NamedTuple):
    hidden: Tensor
    rest: Any


@pytest.mark.parametrize(("microbatches", "stages"), [(1, 1), (1, 3), (3, 1), (3, 3), (5, 2), (2, 5), (8, 4)])
def test_the_clock_gives_every_stage_every_microbatch_a_tick_after_the_stage_before(microbatches: int, stages: int):
    ticks = list(clock_cycles(microbatches, stages))
    when = {work: tick for tick, works in enumerate(ticks) for work in works}
    assert len(ticks) == microbatches + stages - 1
    assert sum(map(len, ticks)) == len(when) == microbatches * stages
    assert all(
        when[microbatch, stage] == microbatch + stage for microbatch in range(microbatches) for stage in range(stages)
    )


def test_the_clock_of_3_microbatches_and_3_stages_is_as_drawn():
    assert [sorted(tick) for tick in clock_cycles(3, 3)] == [
        [(0, 0)],
        [(0, 1), (1, 0)],
        [(0, 2), (1, 1), (2, 0)],
        [(1, 2), (2, 1)],
        [(2, 2)],
    ]


def test_a_module_is_split_where_devices_change_and_layers_without_parameters_follow():
    on = [
        nn.Linear(2, 2, device=device) if device else nn.ReLU() for device in [None, "cpu", None, "meta", None, "cpu"]
    ]
    module = nn.Sequential(*on)
    assert [list(stage._modules) for stage in split_module(module)] == [["0", "1", "2"], ["3", "4"], ["5"]]
    assert [list(stage._modules) for stage in split_module(module, [1, 4])] == [["0"], ["1", "2", "3"], ["4", "5"]]
    assert split_module(module)[1][0] is module[3]
    mixed = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))
    with pytest.raises(ValueError, match=r"layer '0' is on \['cpu', 'meta'\]"):
        split_module(mixed)


def test_stages_work_on_their_own_threads_and_on_different_microbatches_at_the_same_time():
    # Each stage waits until the other is in its forward. One thread, or stages in sequence, would never get there.
    barrier, seen = threading.Barrier(2), ([], [])
    first = Meeting(barrier, seen[0], lambda microbatch: microbatch > 0)
    last = Meeting(barrier, seen[1], lambda microbatch: microbatch < 3)
    inputs = torch.arange(4.0).reshape(4, 1)
    assert torch.equal(pipe_of(first, last)(inputs), inputs)
    threads = [{thread for thread, _ in each} for each in seen]
    assert [len(each) for each in threads] == [1, 1]
    assert len({*threads[0], *threads[1], threading.get_ident()}) == 3
    assert [[value for _, value in each] for each in seen] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    "settings", [{"chunks": 4}, {"chunks": 1}, {"split_size": 3}, {"split_size": 20}, {"chunks": 64}]
)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_outputs_and_gradients_are_those_of_the_module(settings: dict[str, int], stages: int):
    module = mlp(5, 7, 6, 3)
    torch.manual_seed(1)
    inputs = torch.randn(10, 5, dtype=torch.float64)
    mine, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    reference = copy.deepcopy(module)
    model = Pipe(module, devices=["cpu"] * stages, **settings)
    for _ in range(2):
        output, wanted = model(mine), reference(theirs)
        torch.testing.assert_close(output, wanted)
        output.square().mean().backward()
        wanted.square().mean().backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_gradients_of_a_gpt_have_the_bits_of_a_loop_over_microbatches():
    def built() -> nn.Sequential:
        torch.manual_seed(0)
        return build_gpt(GptShape("own", d_model=8, d_ff=16, layers=3, heads=2, context=5, vocabulary=11, tied=True), 1)

    module, reference = built(), built()
    tokens = torch.randint(11, (7, 5))
    output = Pipe(module, 3, devices=["cpu"] * 3)(tokens)
    wanted = torch.cat([nn.Sequential.forward(reference, part) for part in tokens.split([3, 2, 2])])
    assert torch.equal(output, wanted)
    output.square().sum().backward()
    wanted.square().sum().backward()
    for name, parameter in reference.named_parameters():
        assert torch.equal(module.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]


def test_modes_of_the_caller_are_those_of_the_threads():
    seen: list[tuple[Any, ...]] = []

    def look(x: Tensor) -> Tensor:
        types = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), types
        seen.append((*modes, torch.empty(0).device.type, torch.empty(0).dtype))
        return x

    model = pipe_of(nn.Linear(2, 2), Doing(look))
    inputs, plain = torch.ones(4, 2), (True, False, None, "cpu", torch.float32)
    contexts = [
        (torch.enable_grad(), plain),
        (torch.no_grad(), (False, *plain[1:])),
        (torch.inference_mode(), (False, True, *plain[2:])),
        (torch.autocast("cpu", torch.bfloat16), (*plain[:2], torch.bfloat16, *plain[3:])),
        (torch.device("meta"), (*plain[:3], "meta", plain[4])),
        (torch.enable_grad(), plain),
    ]
    for context, wanted in contexts:
        seen.clear()
        with context:
            output = model(inputs)
        assert seen == [wanted] * 4
        assert output.requires_grad == (wanted[0] and not wanted[1])
        assert output.dtype == (wanted[2] or torch.float32)


def test_training_and_evaluation_reach_the_layers_and_batch_norms_count_microbatches():
    model = pipe_of(nn.BatchNorm1d(3), nn.Dropout(0.5), chunks=4)
    inputs = torch.randn(8, 3)
    model(inputs)
    assert model.module[0].num_batches_tracked == 4
    model.eval()
    torch.testing.assert_close(model(inputs), model.module(inputs))
    assert model.module[0].num_batches_tracked == 4


def test_layers_hand_on_tuples_dictionaries_and_what_is_no_tensor():
    def first(given: dict[str, Any]) -> Both:
        return Both(given["x"] * 2, [given["x"].sum(1), given["name"], None])

    def second(given: Both) -> tuple[Tensor, dict[str, Any]]:
        return given.hidden + given.rest[0][:, None], {"name": given.rest[1], "rest": given.rest[2]}

    model = pipe_of(Doing(first), Doing(second), chunks=3)
    x = torch.randn(7, 2, requires_grad=True)
    output, named = model({"x": x, "name": "as it is"})
    wanted = x * 2 + x.sum(1)[:, None]
    torch.testing.assert_close(output, wanted)
    assert named == {"name": "as it is", "rest": None}
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((7, 2), 4.0))  # type: ignore[arg-type]
    assert isinstance(pipe_of(Doing(first), chunks=2)({"x": x, "name": ""}), Both)


@pytest.mark.parametrize(
    ("samples", "chunks", "lengths"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1]), (0, 4, [0]), (4, 4, [1] * 4)]
)
def test_lengths_of_microbatches_differ_by_at_most_one(samples: int, chunks: int, lengths: list[int]):
    seen: list[int] = []
    model = pipe_of(Doing(lambda x: seen.append(len(x)) or x), chunks=chunks)
    assert model(torch.ones(samples, 2)).shape == (samples, 2)
    assert seen == lengths


def test_a_replaced_layer_is_the_one_that_runs_and_conversions_keep_places():
    model = pipe_of(nn.Linear(2, 2), nn.Linear(2, 2))
    model.module[1] = nn.Flatten()
    inputs = torch.ones(4, 2)
    torch.testing.assert_close(model(inputs), model.module[0](inputs))
    model.double()
    assert model(inputs.double()).dtype == torch.float64
