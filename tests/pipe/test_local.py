"""A pipeline in one process: what the module computes, by a thread a stage, stages at once, and errors at once."""

import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from jobs.shapes import GptShape
from jobs.train.models.gpt import build_gpt
from pipe import Pipe
from pipe.local import clock_cycles, split_module

PATIENCE_S = 20.0  # until a meeting that never comes is given up


class Meeting(nn.Module):
    """Waits in chosen micro-batches until the other stage is at work too, and notes who was there."""

    def __init__(self, barrier: threading.Barrier, seen: list[Any], meets: Callable[[int], bool]) -> None:
        super().__init__()
        self.barrier, self.seen, self.meets, self.calls = barrier, seen, meets, 0

    def forward(self, x: Tensor) -> Tensor:
        microbatch, self.calls = self.calls, self.calls + 1
        self.seen.append((threading.get_ident(), int(x[0, 0])))
        if self.meets(microbatch):
            self.barrier.wait(PATIENCE_S)
        return x.clone()


class Doing(nn.Module):
    """Does in a forward what a test wants."""

    def __init__(self, do: Callable[[Any], Any]) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: Any) -> Any:
        return self.do(x)


class Both(NamedTuple):
    hidden: Tensor
    rest: Any


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers)


def pipe_of(*layers: nn.Module, chunks: int = 4, **settings: Any) -> Pipe:
    return Pipe(nn.Sequential(*layers), chunks, devices=["cpu"] * settings.pop("stages", len(layers)), **settings)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Ends what a test lets wait, however it goes."""
    event = threading.Event()
    yield event
    event.set()


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
    with pytest.raises(ValueError, match=r"layer '0' lies on \['cpu', 'meta'\]"):
        split_module(mixed)


def test_stages_work_on_their_own_threads_and_on_different_microbatches_at_the_same_time():
    # Each waits until the other is in its forward, too: one thread, or one stage after the other, never gets there.
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


def test_an_error_is_raised_once_and_at_once_and_the_pipe_goes_on(released: threading.Event):
    begun, after, late, failing, busy = [], [], [], [True], threading.Event()

    def slow(x: Tensor) -> Tensor:
        begun.append(int(x[0, 0]))
        if failing[0] and x[0, 0] == 2:
            busy.set()
            if not released.wait(PATIENCE_S):
                late.append("the error waited for this stage")
        return x

    def fail(x: Tensor) -> Tensor:
        if failing[0] and x[0, 0] == 1:
            busy.wait(PATIENCE_S)
            raise KeyError("broken")
        return x

    model = pipe_of(Doing(slow), Doing(fail), Doing(lambda x: after.append(int(x[0, 0])) or x), chunks=8)
    inputs = torch.arange(8.0).reshape(8, 1)
    with pytest.raises(KeyError, match="broken") as caught:
        model(inputs)
    assert getattr(caught.value, "__notes__", ["in stage 1 of 3 on cpu, layers '1' to '1', micro-batch 1 of 8"]) == [
        "in stage 1 of 3 on cpu, layers '1' to '1', micro-batch 1 of 8"
    ]
    released.set()
    failing[0] = False
    begun_before = list(begun)
    assert torch.equal(model(inputs + 10), inputs + 10)
    assert not late
    assert begun_before == [0, 1, 2]  # the rest of the batch was dropped
    assert begun[3:] == list(range(10, 18))
    assert after == [0, *range(10, 18)] or after == list(range(10, 18))  # 0 was on its way there when 1 failed


def test_of_two_stages_that_fail_at_once_one_error_is_raised_and_the_other_is_never_seen():
    barrier = threading.Barrier(2)

    def fail(x: Tensor) -> Tensor:
        barrier.wait(PATIENCE_S)
        raise ArithmeticError("both")

    failing = [True]
    model = pipe_of(
        Doing(lambda x: fail(x) if failing[0] and x[0, 0] == 1 else x),
        Doing(lambda x: fail(x) if failing[0] else x),
        chunks=2,
    )
    inputs = torch.arange(2.0).reshape(2, 1)
    with pytest.raises(ArithmeticError):
        model(inputs)
    failing[0] = False
    assert all(torch.equal(model(inputs), inputs) for _ in range(2))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_ends_programs_reaches_the_caller_and_not_the_thread(error: type[BaseException]):
    failing = [True]

    def leave(x: Tensor) -> Tensor:
        if failing[0]:
            raise error
        return x

    model = pipe_of(Doing(leave), chunks=2)
    with pytest.raises(error):
        model(torch.ones(2, 1))
    failing[0] = False
    assert model(torch.ones(2, 1)).sum() == 2


def test_threads_end_with_the_pipe_and_an_idle_one_holds_nothing():
    held: list[weakref.ref[Tensor]] = []
    model = pipe_of(nn.Tanh(), Doing(lambda x: held.append(weakref.ref(x)) or x + 1))
    with torch.no_grad():
        model(torch.ones(4, 1))
    assert model._workers is not None
    threads = model._workers.threads
    assert all(thread.is_alive() for thread in threads)
    assert [each() for each in held] == [None] * 4
    del model
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


def test_a_closed_pipe_starts_again_and_so_do_a_copy_a_pickle_and_a_fork():
    model = Pipe(mlp(2, 3, 1), 2, devices=["cpu"] * 2)
    inputs = torch.randn(4, 2, dtype=torch.float64)
    wanted = model(inputs)
    model.close()
    assert torch.equal(model(inputs), wanted)
    assert torch.equal(copy.deepcopy(model)(inputs), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(model))(inputs), wanted)
    assert list(model.state_dict()) == [f"module.{name}" for name in model.module.state_dict()]
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(model(inputs), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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


def test_inputs_and_outputs_that_have_no_batch_are_refused_by_number():
    model = pipe_of(Doing(lambda x: x))
    for given, said in [
        ("none", "no tensor with a dimension"),
        ((torch.ones(4), torch.ones(6)), r"of \[4, 6\] samples"),
    ]:
        with pytest.raises(ValueError, match=said):
            model(given)
    inputs = torch.arange(4.0)
    for do, said in [
        (lambda x: x.sum(), "without dimensions of each of 4"),
        (lambda x: float(x[0]), r"micro-batches made \[0.0, 1.0"),
        (lambda x: (x,) * (1 + int(x[0])), r"a tuple of \[1, 2, 3, 4\]"),
        (lambda x: x if x[0] else None, r"\['NoneType', 'Tensor'\]"),
    ]:
        with pytest.raises(ValueError, match=said):
            pipe_of(Doing(do))(inputs)


def test_settings_that_cannot_be_are_refused_with_numbers():
    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))

    two: dict[str, Any] = {"devices": ["cpu", "cpu"], "chunks": 1}
    for settings, said in [
        ({"devices": ["cpu"]}, "chunks is None and split_size None"),
        ({**two, "split_size": 2}, "chunks is 1 and split_size 2"),
        ({**two, "chunks": 0}, "chunks: must be a whole number from 1, got 0"),
        ({"chunks": 1, "devices": ["cpu"] * 4}, "4 stages of 3 layers"),
        ({**two, "balance": [1, 1]}, r"balance \[1, 1\]: wanted 2 numbers of layers from 1, which sum to 3"),
        ({**two, "balance": [1, 2], "cuts": [1]}, "wanted one of the two"),
        ({**two, "cuts": [3]}, "there is no layer 3 among 3"),
        ({"chunks": 1, "cuts": [1]}, "no devices"),
    ]:
        with pytest.raises(ValueError, match=said):
            Pipe(layers(), **settings)
    assert Pipe(layers(), balance=[2, 1], **two).cuts == Pipe(layers(), cuts=[2], **two).cuts == (0, 2)
    with pytest.raises(TypeError, match=r"found a Linear; wanted an nn\.Sequential"):
        Pipe(nn.Linear(1, 1), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found no layers"):
        Pipe(nn.Sequential(), 1)
    tied = layers()
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"0\.weight and 2\.weight are one tensor, on cpu and on meta"):
        Pipe(tied, 1, devices=["cpu", "meta"])
