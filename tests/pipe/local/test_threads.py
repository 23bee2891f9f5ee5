"""Threads of a pipeline in one process: errors at once, their end, and what is refused before they start."""

import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipe import Pipe
from support.local_pipes import PATIENCE_S, Doing, mlp, pipe_of


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Ends what a test lets wait, however it goes."""
    event = threading.Event()
    yield event
    event.set()


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
