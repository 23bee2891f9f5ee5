"""Threads of a one-process pipeline: prompt errors, clean shutdown, and refusals before they start."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from muster.pipe import Pipe
from muster.pipe.local.workers import StageWorker
from support.live import wait_until
from support.local_pipes import PATIENCE_S, Doing, mlp, pipe_of

ROOT = Path(__file__).parents[3]


@dataclass
class Outputs:
    """Compares its fields, so comparing tensors raises an error."""

    logits: Tensor


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set an event at the end of a test, even if it fails, to release its waiting threads."""
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
    assert begun_before == [0, 1, 2]  # the rest of the batch was skipped
    assert begun[3:] == list(range(10, 18))
    assert after == [0, *range(10, 18)] or after == list(range(10, 18))  # 0 was already sent to it when 1 failed


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
    threads = model._workers.threads
    assert all(thread.is_alive() for thread in threads)
    assert len(held) == 4
    wait_until(lambda: not any(each() is not None for each in held), "the threads to be idle")
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


AT_WORK = """
import sys, threading, torch
from torch import nn
from muster.pipe import Pipe

class Work(nn.Module):
    def __init__(self, do):
        super().__init__()
        self.do = do

    def forward(self, x):
        return self.do(x)

busy = threading.Event()

def fail(x):
    if x[0] == 1:
        busy.wait()
        raise ValueError("broken")
    return x

def work(x):
    if x[0] == 0:
        busy.set()
        for _ in range(20_000):
            x = x + 1
        print("worked to the end", flush=True)
    return x

Pipe(nn.Sequential(Work(fail), Work(work)), 2, devices=["cpu", "cpu"])(torch.arange(2.0))
"""


def test_an_error_that_ends_the_program_while_a_stage_is_at_work_ends_it_in_order():
    # A thread still running when the interpreter exits made the process abort: exit code 134, and a core dump.
    ended = subprocess.run(
        [sys.executable, "-c", AT_WORK], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (1, "worked to the end\n")
    assert "terminate" not in ended.stderr
    assert "ValueError: broken" in ended.stderr


def test_pipes_that_are_closed_leave_nothing_that_waits_for_their_end():
    model = pipe_of(nn.Tanh(), nn.Tanh())
    model(torch.ones(4, 1))
    before = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    for _ in range(3):
        model.close()
        model(torch.ones(4, 1))
    assert len(weakref.finalize._registry) <= before  # type: ignore[attr-defined]


def test_threads_that_use_a_pipe_at_once_start_one_thread_a_stage():
    model, users, outputs = pipe_of(nn.Tanh(), nn.Tanh(), chunks=3), 4, []
    inputs = [torch.full((6, 1), float(number)) for number in range(users)]
    barrier, before = threading.Barrier(users), set(threading.enumerate())
    start = StageWorker.start

    def slow(worker: StageWorker) -> None:  # another caller sees no live thread while this one starts
        time.sleep(0.01)
        start(worker)

    def use(number: int) -> None:
        barrier.wait(PATIENCE_S)
        outputs.append((number, model(inputs[number])))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(users)]
    with mock.patch.object(StageWorker, "start", slow):
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE_S)
    assert len(set(threading.enumerate()) - before) == 2
    assert len(outputs) == users
    assert all(torch.equal(output, inputs[number].tanh().tanh()) for number, output in outputs)


def test_what_only_the_calling_thread_knows_is_refused_and_not_left_out():
    # torch.func.grad used to give wrong gradients: transforms are per thread, and the stages ran on others.
    model = Pipe(mlp(2, 3, 1), 2, devices=["cpu"] * 2)
    inputs = torch.ones(4, 2, dtype=torch.float64)
    parameters = dict(model.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, given, (inputs,)).sum()

    for use in (
        lambda: torch.func.grad(loss)(parameters),
        lambda: torch.vmap(model)(inputs[None]),
        lambda: torch.func.vjp(model, inputs),
    ):
        with pytest.raises(RuntimeError, match=r"transform of torch\.func .* apply it to the pipe's \.module"):
            use()
    assert torch.equal(loss(parameters), model(inputs).sum())


def test_inputs_and_outputs_that_have_no_batch_are_refused_by_number():
    model = pipe_of(Doing(lambda x: x))
    for given, said in [
        ("none", "no tensor with a dimension"),
        ((torch.ones(4), torch.ones(6)), r"with \[4, 6\] samples"),
    ]:
        with pytest.raises(ValueError, match=said):
            model(given)
    inputs = torch.arange(4.0)
    for do, said in [
        (lambda x: x.sum(), "each of 4 micro-batches returned a tensor without dimensions"),
        (lambda x: float(x[0]), r"micro-batches returned \[0.0, 1.0"),
        (lambda x: (x,) * (1 + int(x[0])), r"tuples with lengths or keys \[1, 2, 3, 4\]"),
        (lambda x: x if x[0] else None, r"\['NoneType', 'Tensor'\]"),
        (lambda x: Outputs(x.repeat(2)), "each micro-batch returned a Outputs, which cannot be joined"),
        (lambda x: (x, x.repeat(2).numpy()), "each micro-batch returned a ndarray, which cannot be joined"),
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
        ({**two, "chunks": 0}, "chunks: must be an integer of 1 or more, got 0"),
        ({"chunks": 1, "devices": ["cpu"] * 4}, "4 stages of 3 layers"),
        ({**two, "balance": [1, 1]}, r"balance \[1, 1\]: expected 2 positive layer counts with the sum 3"),
        ({**two, "balance": [1, 2], "cuts": [1]}, "pass only one of them"),
        ({**two, "cuts": [3]}, "there is no layer 3, only 3 layers"),
        ({"chunks": 1, "cuts": [1]}, "without devices"),
        ({"chunks": 1, "devices": "cpu"}, "devices: got 'cpu'; expected a list"),
        ({"chunks": 1, "devices": []}, r"devices: got \[\]; expected a list"),
        ({"chunks": 1, "devices": ["cpu", "cuda:99"]}, r"devices: cuda:99: this process sees \d+ GPUs"),
    ]:
        with pytest.raises(ValueError, match=said):
            Pipe(layers(), **settings)
    assert Pipe(layers(), balance=[2, 1], **two).cuts == Pipe(layers(), cuts=[2], **two).cuts == (0, 2)
    with pytest.raises(TypeError, match=r"got a Linear; expected an nn\.Sequential"):
        Pipe(nn.Linear(1, 1), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="module has no layers"):
        Pipe(nn.Sequential(), 1)
    tied = layers()
    tied[2].weight = tied[0].weight
    with pytest.raises(
        ValueError, match=r"0\.weight and 2\.weight are one tensor, but their layers are on cpu and meta"
    ):
        Pipe(tied, 1, devices=["cpu", "meta"])
