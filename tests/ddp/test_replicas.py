"""Replicas in threads of one process: their gradients are those of one process, and failures reach the caller."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from muster.ddp import Replicas

CPU = torch.device("cpu")


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double()


def stepped(devices: int, steps: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train replicas; return the last gradients and all state of the first one."""
    module = model()
    replicas = Replicas(module, [CPU] * devices)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = batch.tensor_split(devices)
    for _ in range(steps):
        optimizer.zero_grad()
        replicas.replicate()
        replicas.run(lambda index, each: functional.mse_loss(each(parts[index]), parts[index][:, :2]).backward())
        replicas.reduce()
        optimizer.step()
    return [each.grad for each in module.parameters()], [*module.parameters(), *module.buffers()]


def test_gradients_are_the_mean_of_the_replicas_in_their_order():
    module = model()
    parts = torch.arange(72.0, dtype=torch.float64).view(12, 6).tensor_split(3)
    replicas = Replicas(module, [CPU] * 3)
    replicas.run(lambda index, each: each(parts[index]).square().mean().backward())
    replicas.reduce()
    alone, wanted = model(), []
    for part in parts:
        wanted.append(torch.autograd.grad(alone(part).square().mean(), [*alone.parameters()]))
    for mine, own in zip(module.parameters(), zip(*wanted, strict=True), strict=True):
        assert torch.equal(mine.grad, (own[0] + own[1] + own[2]) / 3)
    assert all(each.grad is None for copied in replicas.modules[1:] for each in copied.parameters())


def test_one_replica_is_the_module_itself_and_equal_runs_have_equal_bits():
    module = model()
    assert Replicas(module, [CPU]).modules == [module]
    for found, again in zip(stepped(4), stepped(4), strict=True):
        assert all(map(torch.equal, found, again))


def test_copies_follow_the_first_module_in_parameters_and_buffers():
    module = model()
    replicas = Replicas(module, [CPU] * 2)
    with torch.no_grad():
        for each in [*module.parameters(), *module.buffers()]:
            each.add_(1)
    replicas.replicate()
    mine, theirs = ([*each.parameters(), *each.buffers()] for each in replicas.modules)
    assert all(map(torch.equal, mine, theirs))
    assert not {each.data_ptr() for each in mine} & {each.data_ptr() for each in theirs}


def test_a_tied_weight_stays_tied_and_an_unused_one_has_no_gradient():
    module = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3)])
    module[1].weight = module[0].weight
    replicas = Replicas(module, [CPU] * 2)
    replicas.run(lambda index, each: each[1](each[0](torch.ones(1, 3))).sum().backward())
    replicas.reduce()
    assert replicas.modules[1][0].weight is replicas.modules[1][1].weight
    assert module[0].weight.grad is not None
    assert module[2].weight.grad is None


def test_replicas_run_at_the_same_time_and_the_first_failing_one_is_raised():
    meeting = threading.Barrier(3, timeout=30)

    def fail(index: int, module: nn.Module) -> None:
        meeting.wait()
        if index:
            raise ValueError(f"replica {index}")

    with pytest.raises(ValueError, match="replica 1"):
        Replicas(model(), [CPU] * 3).run(fail)


@pytest.mark.gpu(2)
def test_replicas_on_two_gpus_compute_the_mean_of_both():
    devices = [torch.device("cuda", number) for number in range(2)]
    module = model().to(devices[0])
    parts = [torch.randn(6, 6, dtype=torch.float64).to(device) for device in devices]
    replicas = Replicas(module, devices)
    replicas.replicate()
    replicas.run(lambda index, each: each(parts[index]).square().mean().backward())
    replicas.reduce()
    wanted = []
    for part in parts:
        alone = model().to(devices[0])
        wanted.append(torch.autograd.grad(alone(part.to(devices[0])).square().mean(), [*alone.parameters()]))
    for parameter, first, second in zip(module.parameters(), *wanted, strict=True):
        assert parameter.grad.device == devices[0]
        torch.testing.assert_close(parameter.grad, (first + second) / 2)


def test_a_module_elsewhere_and_no_device_are_refused():
    with pytest.raises(ValueError, match="needs at least one device, got none"):
        Replicas(model(), [])
    with pytest.raises(ValueError, match="must be on the first device, meta, but has tensors on cpu"):
        Replicas(model(), [torch.device("meta"), CPU])
