"""A pipeline refuses invalid uses. If one rank fails, all ranks fail promptly, with the same cause."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.world.world import World
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.tables import schedule
from muster.pipe.wires.failures import StageFailedError
from support.refusals import told_by

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PROMPT_S = 20.0  # less than the 30 s timeout of the groups, so that no rank ends by a timeout


class Failing(nn.Linear):
    """Does something wrong in one of its forwards or backwards."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(4, 4)
        self.what, self.at, self.count = what, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count != self.at:
            return super().forward(x)
        if self.what == "forward":
            raise ValueError("burst\nin two lines")
        if self.what == "in place":
            x.add_(1.0)
        if self.what == "tuple":
            return (x,)  # type: ignore[return-value]
        output = super().forward(x)
        if self.what == "backward":
            output.register_hook(lambda _: 1 / 0)
        return output[:, :2] if self.what == "shape" else output


def layers_with(what: str, at: int, stage: int, stages: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Failing(what if each == stage else "nothing", at) for each in range(stages)))


def failing(world: World, name: str, what: str, at: int, stage: int) -> list[Any]:
    """Step until it fails, and once more; return the errors, and whether the ranks can still communicate."""
    pipeline = Pipeline(
        layers_with(what, at, stage), schedule(name, world.size, 4), loss=functional.cross_entropy, cuts=(0, 1, 2)
    )
    inputs, targets = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
    said = [told_by(lambda: [pipeline.step(inputs, targets) for _ in range(3)]) for _ in range(2)]
    number = torch.ones(1)
    dist.all_reduce(number, group=world.group)
    return [*said, float(number)]


FAILURES = [
    ("1f1b", "forward", 7, 1, "ValueError: burst\nin two lines", "ValueError: burst"),
    ("gpipe", "backward", 2, 2, "ZeroDivisionError: division by zero", None),
    # The first stage's last backward: the others have ended this step, and only fail in their next one.
    ("1f1b", "backward", 4, 0, "ZeroDivisionError: division by zero", None),
    (
        "1f1b",
        "in place",
        6,
        2,
        "RuntimeError: stage 2: layer '2' overwrites the output of stage 1, unlike in its first forward; "
        "give the layer an attribute inplace=True",
        None,
    ),
    (
        "gpipe",
        "shape",
        5,
        0,
        "ValueError: the activation of micro-batch 0 for stage 1 is (2, 2) of torch.float32, but earlier ones "
        "for the same number of samples were (2, 4) of torch.float32; shapes and types must depend on the inputs only",
        None,
    ),
    ("model", "tuple", 1, 1, "TypeError: stage 1: layer '1' returned a tuple; one tensor crosses a cut", None),
]


@pytest.mark.parametrize(
    ("name", "what", "at", "stage", "own", "cause"), FAILURES, ids=[f"{each[1]} {each[3]}" for each in FAILURES]
)
def test_a_stage_that_raises_ends_all_ranks_and_is_the_cause(on_ranks, name, what, at, stage, own, cause):
    answers = on_ranks(3, failing, deadline_s=PROMPT_S, name=name, what=what, at=at, stage=stage)
    told = f"stage {stage} on rank {stage} failed: {cause or own}"
    for rank, (first, second, ranks) in enumerate(answers):
        assert first.startswith(own if rank == stage else f"StageFailedError: {told}")
        assert second.startswith(f"StageFailedError: this pipeline has ended: {told}")
        assert ranks == 3.0


def freezing(world: World) -> str:
    """Freeze the layers before the cut after a step."""
    layers = layers_with("nothing", 0, 0, 2)
    pipeline = Pipeline(layers, schedule("1f1b", 2, 2), loss=functional.cross_entropy)
    inputs, targets = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    pipeline.step(inputs, targets)
    layers[0].requires_grad_(False)
    return told_by(lambda: pipeline.step(inputs, targets))


def test_what_learns_before_a_cut_stays_as_it_was(on_ranks):
    own, other = on_ranks(2, freezing, deadline_s=PROMPT_S)
    wanted = "(2, 4) of torch.float32; keep the layers before a cut trainable or frozen as in the first step"
    assert wanted in own
    assert other.startswith("StageFailedError: stage 0 on rank 0 failed: ValueError: the activation of micro-batch 0")


def failing_beside(world: World) -> list[str]:
    """Two independent pipelines: the last stage of the second one raises, or its process is lost."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    inputs, targets = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
    said = []
    for what in ("forward", "nothing"):
        layers = layers_with(what if world.rank > 1 else "nothing", 2, 1, 2)
        group = groups[world.rank // 2]
        pipeline = Pipeline(layers, schedule("1f1b", 2, 4), loss=functional.cross_entropy, process_group=group)
        assert pipeline._connections is not None
        if world.rank == 3 and what == "nothing":
            pipeline._connections.abort()
            break
        said.append(told_by(lambda: pipeline.step(inputs, targets)))  # noqa: B023
    return said


def test_ranks_are_those_of_the_world_where_pipelines_are_a_part_of_it(on_ranks):
    first, second, third, last = on_ranks(4, failing_beside, deadline_s=PROMPT_S)
    assert first == second == ["nothing was raised"] * 2
    assert last == ["ValueError: burst\nin two lines"]
    raised, lost = third
    assert raised == "StageFailedError: stage 1 on rank 3 failed: ValueError: burst"
    assert lost.startswith("StageFailedError: rank 2: ")
    assert "lost rank 3: " in lost


def test_an_error_says_in_which_stage_it_came_up():
    pipeline = Pipeline(
        layers_with("forward", 3, 1), schedule("interleaved", 1, 4), loss=functional.cross_entropy, cuts=(0, 1)
    )
    with pytest.raises(ValueError, match="burst") as caught:
        pipeline.step(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))
    told = ["in stage 1 on rank 0, layers '1' to '2', at F1.2 of interleaved"]
    assert getattr(caught.value, "__notes__", []) == (told if hasattr(ValueError, "add_note") else [])  # not in 3.10


def test_an_error_between_steps_is_in_no_stage():
    pipeline = Pipeline(layers_with("nothing", 0, 0), schedule("1f1b", 1, 4), loss=functional.cross_entropy)
    pipeline.step(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))
    assert not pipeline.in_last_backward
    with pytest.raises(ValueError, match="8 inputs but 7 targets") as caught:
        pipeline.step(torch.randn(8, 4), torch.zeros(7, dtype=torch.int64))
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(StageFailedError, match=r"has ended: rank 0 failed: ValueError: 8 inputs but 7 targets"):
        pipeline.step(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))


def gone(world: World) -> str:
    """Rank 1 stops communicating in the middle, like a process that dies."""
    pipeline = Pipeline(layers_with("nothing", 0, 0), schedule("1f1b", world.size, 4), loss=functional.cross_entropy)
    inputs, targets = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
    pipeline.step(inputs, targets)
    assert pipeline._connections is not None
    if world.rank == 1:
        pipeline._connections.abort()
        return "gone"
    return told_by(lambda: pipeline.step(inputs, targets))


def test_a_rank_that_is_gone_ends_the_others(on_ranks):
    first, _, last = on_ranks(3, gone, deadline_s=PROMPT_S)
    for said in (first, last):
        assert said.startswith("StageFailedError: rank ")
        assert "lost rank 1" in said


HAZARDS = [  # user schedules whose messages would deadlock on a wire that keeps their order
    ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"),
    ("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1", "F1.0 F1.1 I1.0 I1.1 W1.0 W1.1"),
    ("F0.0 F0.1 B0.0 B0.1", "F1.1 F1.0 B1.0 B1.1"),
]


def own_table(*rows: str, name: str = "own") -> Schedule:
    """Build a schedule of two micro-batches from text, one row per rank."""
    actions = tuple(
        tuple(Action(each[0], *map(int, each[1:].split("."))) for each in row.split())  # type: ignore[arg-type]
        for row in rows
    )
    rank_of = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    return Schedule(name, 2, tuple(rank_of[stage] for stage in sorted(rank_of)), actions)


def refused(world: World) -> list[str]:
    def built(
        layers: nn.Module | None = None, name: str = "1f1b", ranks: int = 2, **settings: Any
    ) -> Callable[[], Any]:
        table = schedule(name, ranks, 4)
        return lambda: Pipeline(
            layers or layers_with("nothing", 0, 0),  # type: ignore[arg-type]
            table,
            loss=functional.cross_entropy,
            process_group=world.group,
            **settings,
        )

    loose = layers_with("nothing", 0, 0)
    loose.register_parameter("scale", nn.Parameter(torch.ones(1)))
    short = schedule("gpipe", 2, 4)
    short = type(short)(short.name, 4, short.rank_of, (short.actions[0][:-1], short.actions[1]))
    with mock.patch.object(dist, "new_group", side_effect=AssertionError("something was sent")):
        unsent = [
            told_by(lambda: Pipeline(layers_with("nothing", 0, 0), each, loss=functional.cross_entropy))  # noqa: B023
            for each in (short, *(own_table(*rows) for rows in HAZARDS))
        ]
    said = [
        told_by(built(ranks=4)),
        told_by(built(nn.Linear(3, 4))),
        told_by(built(loose)),
        told_by(built(name="zbv")),
        told_by(built(cuts=(0, 3))),
        told_by(built(cuts=(0, 1 + world.rank))),
        *unsent,
    ]
    four, classes = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)
    for inputs, targets in (
        (torch.ones(0, 4), torch.ones(0)),
        (torch.ones(3, 4), torch.ones(2)),
        (four, None),
        (four.clone().requires_grad_(), classes),
    ):
        pipeline = built()()
        said.append(told_by(lambda: pipeline.step(inputs, targets)))  # type: ignore[arg-type] # noqa: B023
    pipeline = built()()
    pipeline.loss_sum = None
    said.append(told_by(lambda: setattr(pipeline.module, "0" if world.rank == 0 else "2", nn.Identity())))
    for loss in (lambda x, y: functional.cross_entropy(x, y).detach(), lambda x, _: x, lambda *_: 1.5):
        pipeline = Pipeline(layers_with("nothing", 0, 0), schedule("1f1b", 2, 4), loss=loss)
        said.append(told_by(lambda: pipeline.step(four, classes)))  # noqa: B023
    pipeline = built()()
    said.append(told_by(lambda: copy.deepcopy(pipeline)))
    said.append(told_by(lambda: pickle.dumps(pipeline)))
    with torch.inference_mode():
        said.append(told_by(lambda: pipeline.step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))))
    pipeline = built()()
    more = torch.ones(4 + world.rank, 4), torch.zeros(4 + world.rank, dtype=torch.int64)
    said.append(told_by(lambda: pipeline.step(*more)))
    return said


def test_what_cannot_be_is_refused_with_numbers(on_ranks):
    wanted = [
        "ValueError: schedule 1f1b is for 4 ranks, but the group has 2",
        "TypeError: a pipeline needs an nn.Sequential to cut into stages, got a Linear",
        "ValueError: scale belongs to no layer and therefore to no stage; move it into a layer",
        "ValueError: 4 stages of 3 layers",
        "ValueError: cuts [0, 3]: there is no layer 3, only 3 layers",
        "ValueError: the ranks' pipelines differ: ",
        "ScheduleError: schedule gpipe: rank 0 never runs B0.3",
        "ScheduleError: schedule own: ranks deadlock: rank 0 before B0.0, rank 1 before F1.1",
        "ScheduleError: schedule own: ranks deadlock: rank 0 before I0.0, rank 1 before F1.1",
        "ScheduleError: schedule own: rank 1 runs F1.1 before F1.0 (places 0 and 1); swap them",
        "ValueError: a batch of 0 samples; pass at least one",
        "ValueError: 3 inputs but 2 targets; pass one target per input",
        "TypeError: targets: got a NoneType; pass one tensor, with samples in dimension 0",
        "ValueError: inputs require a gradient, which a pipeline does not return; pass inputs.detach()",
        "AttributeError: layer ",
        "stage 1 on rank 1 failed: RuntimeError: stage 1: the loss does not require a gradient",
        "stage 1 on rank 1 failed: ValueError: the loss is of shape (1, 4); expected a tensor with one element",
        "stage 1 on rank 1 failed: ValueError: the loss is a float; expected a tensor with one element",
        "TypeError: a pipeline holds connections and cannot be copied or pickled; copy its module or state dict",
        "TypeError: a pipeline holds connections and cannot be copied or pickled; copy its module or state dict",
        "RuntimeError: a pipeline cannot run within torch.inference_mode(); call it outside: evaluate() builds no "
        "graph anyway",
        "rank 1 failed: ValueError: rank 1 was passed 5 samples of shape (4,), torch.float32, but rank 0 was "
        "passed 4 samples",
    ]
    for said in on_ranks(2, refused, deadline_s=PROMPT_S):
        for found, start in zip(said, wanted, strict=True):
            cause = start.rpartition("failed: ")[2]  # the failing rank raises its own error
            assert found.startswith((start, f"StageFailedError: {start}", cause)), (found, start)
