"""The queue of pending weight gradients: when it runs, which hooks it calls, and what it refuses."""

import copy
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.splitting.weight_gradients import Linear, Sums


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def inputs(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 8, requires_grad=True) for _ in range(count)]


def back(module: nn.Module, x: Tensor, queue: WeightQueue | None = None, key: object = 0) -> None:
    y = module(x).square().sum()
    if queue is None:
        y.backward()
        return
    with queue.collecting(key):
        y.backward()


def plain_gradients(module: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    plain = copy.deepcopy(module)
    for x in batches:
        back(plain, x.detach().requires_grad_())
    return [each.grad for each in plain.parameters()]


def same(module: nn.Module, wanted: list[Tensor]) -> bool:
    found = [each.grad for each in module.parameters()]
    return all(a is not None and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_first_half_leaves_weights_alone_and_gives_norms_their_gradients():
    module, (x, *_) = mlp(), inputs()
    with WeightQueue(module) as queue:
        back(module, x, queue)
        assert x.grad is not None
        assert [name for name, each in module.named_parameters() if each.grad is not None] == ["1.weight", "1.bias"]
        assert queue.keys == (0,)
        queue.run(0)
        assert queue.keys == ()
    assert all(each.grad is not None for each in module.parameters())


def test_a_second_half_that_is_not_run_is_missed():
    module, batches = mlp(), inputs(2)
    wanted = plain_gradients(module, batches)
    with WeightQueue(module, exact=True) as queue:
        for index, x in enumerate(batches):
            back(module, x, queue, index)
        queue.run(0)
        with pytest.raises(RuntimeError, match=r"1 backwards have pending weight gradients: call run\(1, \.\.\.\)"):
            queue.finish()
        assert not same(module, wanted)
        queue.run(1)
        queue.finish()
    assert same(module, wanted)


def lose_biases(self: Linear, work, sums: Sums) -> None:
    RUN(self, work._replace(bias=None), sums)


def fuse_always(self: Sums, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    return parameter.grad


def add_at_once(self: Sums, parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


RUN = Linear.run
MUTANTS = {
    "the second half does nothing": (WeightQueue, "run", lambda self, key: self._works.pop(key)),
    "biases are lost": (Linear, "run", lose_biases),
    "products that add are taken for exact": (Sums, "fused", fuse_always),
    "uses are added one by one": (Sums, "add", add_at_once),
}


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_fault_in_the_second_half_changes_bits(mutant):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    module = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)
    batches = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    wanted = plain_gradients(module, batches)
    changed = mock.patch.object(*MUTANTS[mutant]) if mutant else mock.patch.object(nn, "unknown", create=True)
    with changed, WeightQueue(module, exact=True) as queue:
        for index, x in enumerate(batches):
            back(module, x, queue, index)
        for index in range(len(batches)):
            queue.run(index)
    assert same(module, wanted) == (mutant is None)


@pytest.mark.parametrize("exact", [True, False])
def test_hooks_of_parameters_are_called_once_a_backward_with_the_whole_gradient(exact):
    layer = nn.Linear(8, 8)
    module = nn.Sequential(layer, nn.Tanh(), layer, nn.LayerNorm(8), nn.Linear(8, 3))
    batches = inputs(2)

    def listen(module: nn.Module, seen: list[tuple[str, Tensor]]) -> None:
        for name, each in module.named_parameters():
            each.register_post_accumulate_grad_hook(lambda it, name=name: seen.append((name, it.grad.clone())))
        module[0].weight.register_hook(lambda gradient: gradient * 2)

    plain = copy.deepcopy(module)
    wanted: list[tuple[str, Tensor]] = []
    listen(plain, wanted)
    for x in batches:
        back(plain, x.detach().requires_grad_())
    seen: list[tuple[str, Tensor]] = []
    listen(module, seen)
    with WeightQueue(module, exact=exact) as queue:
        for index, x in enumerate(batches):
            back(module, x, queue, index)
            queue.run(index)
    assert len(seen) == len(wanted) == 12
    for name in dict(module.named_parameters()):
        mine, theirs = ([each for other, each in side if other == name] for side in (seen, wanted))
        assert len(mine) == len(theirs) == 2
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True))


def test_parameters_are_ready_when_their_last_use_has_been_added():
    layer = nn.Linear(8, 8)
    module = nn.Sequential(layer, nn.Tanh(), layer, nn.LayerNorm(8), nn.Linear(8, 3))
    names = {each: name for name, each in module.named_parameters()}
    (x, *_) = inputs()
    wanted = dict(zip(names.values(), plain_gradients(module, [x]), strict=True))
    ready: list[str] = []

    def hear(parameter: nn.Parameter) -> None:
        ready.append(names[parameter])
        assert torch.allclose(parameter.grad, wanted[ready[-1]], atol=1e-5)

    with WeightQueue(module) as queue:
        back(module, x, queue)
        for each in (*layer.parameters(), *module[4].parameters()):
            each.register_post_accumulate_grad_hook(hear)
        queue.run(0)
    assert ready == ["4.weight", "4.bias", "0.weight", "0.bias"]


def test_several_backwards_under_one_key_and_work_of_ones_own():
    module, batches = mlp(), inputs(2)
    wanted = plain_gradients(module, batches)
    done: list[str] = []
    with WeightQueue(module) as queue:
        for x in batches:
            back(module, x, queue)
        with queue.collecting(0):
            queue.keep(lambda: done.append("mine"))
        assert done == []
        queue.run(0)
    assert done == ["mine"]
    assert all(torch.allclose(a.grad, b, atol=1e-5) for a, b in zip(module.parameters(), wanted, strict=True))


def test_a_graph_that_is_kept_can_go_back_twice():
    module, (x, *_) = mlp(), inputs()
    wanted = [each * 2 for each in plain_gradients(module, [x])]
    with WeightQueue(module, exact=True) as queue:
        y = module(x).square().sum()
        for index in range(2):
            with queue.collecting(index):
                y.backward(retain_graph=index == 0)
            queue.run(index)
        assert same(module, wanted)
        with queue.collecting(2), pytest.raises(RuntimeError):
            y.backward()


def test_memory_goes_with_the_work():
    module, (x, *_) = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), inputs()
    with WeightQueue(module) as queue:
        y = module(x)
        with queue.collecting(0):
            y.backward(torch.ones_like(y))
        (first, second) = queue._works[0]
        assert second.x.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        kept = weakref.ref(first.x)  # the graph still exists, but no longer holds the input
        del first, second
        assert kept() is not None
        queue.run(0)
        assert kept() is None


def test_nothing_is_kept_where_nothing_learns():
    module, (x, *_) = mlp(), inputs()
    with WeightQueue(module) as queue:
        with torch.no_grad():
            assert not module(x).requires_grad
        with torch.inference_mode():
            module(x.detach())
        assert queue.keys == ()
        module.requires_grad_(False)
        back(module, x, queue)
        assert queue._works == {0: []}
        queue.run(0)
        queue.finish()


def test_a_module_is_what_it_was_within_and_afterwards():
    module = nn.Sequential(nn.Linear(8, 6), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 1))
    before, spelt, kinds = module.state_dict(), repr(module), list(map(type, module))
    with WeightQueue(module) as queue:
        assert repr(module) == spelt
        assert [*module.state_dict()] == [*before]
        assert isinstance(module[0], nn.Linear)
        assert isinstance(module[2], nn.Conv1d)
        with pytest.raises(ValueError, match=r"2 layers \(Linear, \.\.\.\) are already split"):
            WeightQueue(module)
        module.load_state_dict(before)
    assert list(map(type, module)) == kinds
    assert all("_split" not in name for each in module for name in vars(each))
    copy.deepcopy(module)
    WeightQueue(module).restore()
    assert queue.keys == ()


def test_a_queue_that_is_gone_gives_its_layers_back():
    module, (x, *_) = mlp(), inputs()
    kinds = list(map(type, module))
    queue = WeightQueue(module)
    y = module(x).sum()
    del queue
    assert list(map(type, module)) == kinds
    with pytest.raises(RuntimeError, match="after its WeightQueue was deleted"):
        y.backward()


def test_what_cannot_be_is_refused():
    module, (x, other, _) = mlp(), inputs()
    queue = WeightQueue(module)
    with pytest.raises(RuntimeError, match=r"outside of collecting\(key\)"):
        back(module, x)
    with queue.collecting(0), pytest.raises(RuntimeError, match=r"collecting\(1\) within another"), queue.collecting(1):
        pass
    with pytest.raises(RuntimeError, match=r"run\(5\): nothing was collected"):
        queue.run(5)
    back(module, x, queue, 1)
    queue.run(1)
    with pytest.raises(RuntimeError, match=r"run\(1\): nothing was collected under this key, or it has already run"):
        queue.run(1)
    y = module(other).square().sum()
    with queue.collecting(2), pytest.raises(RuntimeError, match="use a plain layer for create_graph=True"):
        y.backward(create_graph=True)
    queue.discard()
    queue.finish()


def test_an_input_that_was_changed_in_place_is_refused():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            y = self.second(hidden)
            hidden.mul_(2)
            return y

    module, (x, *_) = Overwrites(), inputs()
    with WeightQueue(module) as queue:
        y = module(x).sum()
        with queue.collecting(0), pytest.raises(RuntimeError, match=r"the input \(4, 8\) of a split layer was changed"):
            y.backward()


def test_an_error_in_a_backward_leaves_a_queue_that_can_begin_again():
    module, (x, *_) = mlp(), inputs()
    wanted = plain_gradients(module, [x])
    with WeightQueue(module, exact=True) as queue:
        y = module(x)
        y.register_hook(lambda gradient: 1 / 0)
        with queue.collecting("a"), pytest.raises(ZeroDivisionError):
            y.sum().backward()
        queue.discard()
        module.zero_grad()
        x.grad = None
        back(module, x, queue, "a")
        queue.run("a")
    assert same(module, wanted)
