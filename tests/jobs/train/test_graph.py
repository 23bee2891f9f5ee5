"""Recorded steps, as far as a machine without a CUDA device can tell; `test_graph_gpu.py` has the rest."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.train import TrainSettings
from muster.jobs.spec.train_fields import OptimizerSettings
from muster.jobs.train.data.loading import MicroInput, ShardInput
from muster.jobs.train.engine import build_engine
from muster.jobs.train.graph import GraphedSteps, form_of, parts_of, require_no_hooks
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics import numerics_of
from muster.jobs.train.numerics.optim import build_optimizer, set_learning_rate
from muster.jobs.train.profiling.clock import PHASES, StepMarks, clock_for
from muster.jobs.world.world import World
from muster.pipe.graphs import too_little


def shard(samples: int = 2, virtual_rank: int = 0) -> ShardInput:
    micro = MicroInput(torch.zeros(samples, 4, dtype=torch.int64), torch.zeros(samples, 4), samples, 1.0)
    return ShardInput(virtual_rank, (micro, micro))


def test_steps_have_one_form_when_only_their_values_differ() -> None:
    one, two = shard(), shard()
    two.micro_batches[0].inputs.fill_(3)
    assert form_of([one]) == form_of([two])


def test_what_a_recorded_step_cannot_change_makes_another_form() -> None:
    micro = shard().micro_batches[0]
    others = [
        [shard(samples=3)],
        [shard(virtual_rank=1)],
        [shard(), shard(virtual_rank=1)],
        [ShardInput(0, (micro,))],
        [ShardInput(0, (micro, replace(micro, weight=0.5)))],
        [ShardInput(0, (micro, replace(micro, samples=1)))],
        [ShardInput(0, (micro, replace(micro, inputs=micro.inputs.float())))],
    ]
    forms = [form_of(each) for each in [[shard()], *others]]
    assert len(set(forms)) == len(forms)


def test_a_rank_without_a_cuda_device_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"train\.cuda_graph: this rank computes on cpu; set device: cuda"):
        GraphedSteps(None, World(0, 1, None, torch.device("cpu")))  # type: ignore[arg-type]


def test_a_model_with_hooks_is_refused_because_a_replay_would_not_call_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    require_no_hooks(model)
    handle = model[1][0].register_forward_hook(lambda *_: None)  # type: ignore[index]
    with pytest.raises(RefusedError, match=r"train\.cuda_graph: 1\.0 has hooks, .* set cuda_graph: false"):
        require_no_hooks(model)
    handle.remove()
    next(model.parameters()).register_hook(lambda gradient: gradient)
    with pytest.raises(RefusedError, match=r"train\.cuda_graph: 0\.weight has hooks"):
        require_no_hooks(model)


def test_a_graph_needs_room_beside_an_eager_step() -> None:
    mb = 2**20
    assert too_little(peak=500 * mb, held=100 * mb, free=900 * mb) == ""
    assert too_little(peak=500 * mb, held=100 * mb, free=899 * mb) == (
        "a graph beside eager steps may need 900 MB, but 899 MB of the GPU are free"
    )
    assert too_little(peak=100, held=100, free=0) == ""


def test_a_step_lists_its_seeds_in_the_order_in_which_it_sets_them() -> None:
    settings = TrainSettings.model_validate(
        {"model": {"name": "gpt-nano", "dropout": 0.1}, "data": "synthetic", "mode": "single", "seed": 7}
    )
    cpu = torch.device("cpu")
    numerics = numerics_of(settings, cpu)
    model = numerics.place(build_model(settings.model, vocabulary=10, seed=1))
    engine = build_engine(settings, model, World(0, 1, None, cpu), clock_for(cpu), numerics)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    shards = [ShardInput(rank, (MicroInput(tokens, tokens, 2, 0.5),) * 2) for rank in (0,)]
    found: list[int] = []
    with engine.seeded_by(found.append):
        engine.run(3, shards)
    assert found == engine.seeds(3, shards)
    assert len(set(found)) == 2
    assert engine.notice == ""


def test_marks_of_a_recording_are_left_out_and_a_replayed_step_has_a_phase_of_its_own() -> None:
    now = iter(range(100))
    clock = StepMarks(lambda: float(next(now)), lambda before, after: after - before)
    clock.start()
    clock.lap("data")
    with clock.muted():
        clock.lap("forward")
        clock.lap("optimizer")
    clock.lap("replay")
    clock.stop()
    row = clock.take()[0].row()
    assert row == {"step_s": 2.0, "data_s": 1.0, "replay_s": 1.0} | {f"{phase}_s": 0.0 for phase in PHASES[1:]}


def test_only_a_step_with_a_replay_has_a_column_for_it() -> None:
    clock = StepMarks(lambda: 0.0, lambda before, after: after - before)
    clock.start()
    clock.lap("forward")
    clock.stop()
    assert set(clock.take()[0].row()) == {"step_s", *(f"{phase}_s" for phase in PHASES)}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_learning_rate_in_a_tensor_is_overwritten_and_trains_as_a_number_does(name: str) -> None:
    trained = []
    for capturable in (False, True):
        parameter = torch.nn.Parameter(torch.ones(3))
        settings = OptimizerSettings(name=name, lr=0.5)  # type: ignore[arg-type]
        optimizer = build_optimizer([parameter], settings, capturable=capturable)
        rate = optimizer.param_groups[0]["lr"]
        for value in (0.25, 0.125):
            set_learning_rate(optimizer, value)
            parameter.grad = torch.full((3,), 2.0)
            if not (capturable and name == "adamw"):  # on a CPU only numbers step it
                optimizer.step()
        if capturable:
            assert optimizer.param_groups[0]["lr"] is rate
            assert float(rate) == 0.125
        trained.append(parameter.detach().clone())
    if name == "sgd":
        assert torch.equal(*trained)


class TwoHalves:
    """A step that writes down which of its halves run."""

    def __init__(self, *, is_checked: bool) -> None:
        self.is_checked = is_checked
        self.ran: list[str] = []

    def run(self, step: int, shards: Sequence[ShardInput]) -> list[torch.Tensor]:
        self.ran.append("whole")
        return [torch.ones(1)]

    def differentiate(self, step: int, shards: Sequence[ShardInput]) -> list[torch.Tensor]:
        self.ran.append("gradients")
        return [torch.ones(1)]

    def update(self) -> None:
        self.ran.append("update")


def test_a_step_that_the_host_checks_becomes_two_graphs() -> None:
    for is_checked, wanted in ((False, ["whole"]), (True, ["gradients", "update"])):
        work = TwoHalves(is_checked=is_checked)
        results = [part() for part in parts_of(work, 0, [shard()])]  # type: ignore[arg-type]
        assert work.ran == wanted
        assert results[0] == [torch.ones(1)]
        assert results[1:] == [None] * is_checked
