"""A pipeline over GPUs of one process: correct gradients on any streams, and copies that overlap computation.

`pytest -m gpu`, two GPUs.
"""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster.pipe import Pipe
from muster.pipe.local.across import Streams

pytestmark = pytest.mark.gpu(2)

DEVICES = ["cuda:0", "cuda:1"]
PATIENCE_S = 20.0
LONG_CYCLES = 3_000_000_000  # takes a second or two


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    widths = [(64, 512), (512, 512), (512, 512), (512, 8)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(*each, dtype=torch.float64), nn.Tanh()) for each in widths))


@pytest.mark.parametrize("own_streams", [False, True])
@pytest.mark.parametrize("inputs_on", ["cpu", "cuda:0", "cuda:1"])
def test_gradients_are_those_of_one_gpu_whatever_streams_are_current(own_streams: bool, inputs_on: str):
    module = layers()
    reference = copy.deepcopy(module).to("cuda:0")
    model = Pipe(module, 5, devices=DEVICES)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    streams = [torch.cuda.Stream(device) if own_streams else torch.cuda.default_stream(device) for device in DEVICES]
    torch.cuda.synchronize("cuda:0")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(streams[1]), torch.cuda.stream(streams[0]):
        for step in range(4):
            inputs = torch.randn(501, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            mine = inputs.clone().to(inputs_on).requires_grad_()
            theirs = inputs.to("cuda:0").requires_grad_()
            output, wanted = model(mine), reference(theirs)
            assert output.device == torch.device("cuda:1")
            torch.testing.assert_close(output.to("cuda:0"), wanted)
            output.square().sum().backward()
            wanted.square().sum().backward()
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.to("cuda:0"), theirs.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for device in DEVICES:  # the last updates are on other streams than the comparison
        torch.cuda.synchronize(device)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).to("cuda:0"), parameter)


class Doing(nn.Module):
    """Runs a function of the test in its forward."""

    def __init__(self, do: Any) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.do(x)
        return made


def test_a_copy_leaves_while_its_sender_computes_the_next_microbatch(monkeypatch: pytest.MonkeyPatch):
    busy, ends, found = threading.Event(), [], []
    fetch = Streams.fetch

    def late_fetch(self: Streams, value: Any, ready: Any) -> Any:
        if self.device == torch.device("cuda:1"):
            busy.wait(PATIENCE_S)  # until the next micro-batch is queued on the sender's compute stream
        return fetch(self, value, ready)

    def send(x: Tensor) -> Tensor:
        y = x + 1
        if len(ends) == 1:
            torch.cuda._sleep(LONG_CYCLES)
        ends.append(torch.cuda.current_stream().record_event())
        if len(ends) == 2:
            busy.set()
        return y

    def receive(x: Tensor) -> Tensor:
        if not found:
            torch.cuda.current_stream().synchronize()  # the copy has arrived
            found.append(ends[1].query())
        return x

    monkeypatch.setattr(Streams, "fetch", late_fetch)
    model = Pipe(nn.Sequential(Doing(send), Doing(receive)), 2, devices=DEVICES)
    inputs = torch.arange(4.0, device="cuda:0")
    model(inputs)  # one-time initialization
    ends.clear(), found.clear(), busy.clear()
    assert torch.equal(model(inputs).cpu(), torch.arange(4.0) + 1)
    assert found == [False]  # while the sender was still computing


def test_autocast_reaches_the_threads():
    model = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, devices=DEVICES)
    with torch.autocast("cuda", torch.bfloat16):
        assert model(torch.ones(4, 4, device="cuda:0")).dtype == torch.bfloat16
    assert model(torch.ones(4, 4, device="cuda:0")).dtype == torch.float32


def test_an_error_of_one_gpus_stage_leaves_the_pipe_usable():
    failing = [True]

    def fail(x: Tensor) -> Tensor:
        if failing[0]:
            raise ArithmeticError("broken")
        return x

    model = Pipe(nn.Sequential(nn.Linear(4, 4), Doing(fail)), 4, devices=DEVICES)
    inputs = torch.ones(8, 4, device="cuda:0")
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            model(inputs)
    failing[0] = False
    torch.testing.assert_close(model(inputs).to("cuda:0"), model.module[0](inputs))
