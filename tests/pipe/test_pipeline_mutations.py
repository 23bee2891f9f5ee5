"""Tests of the tests: the checks used by other tests must detect mistakes in a pipeline."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from muster.jobs.world.world import World
from muster.pipe import pipeline, run
from muster.pipe.buffers import BufferSnapshot
from muster.pipe.microbatch_passes import WholeGraphPass
from muster.pipe.run import RankOperations, RowExecution, StageInput, row_of
from muster.pipe.stage import Stage
from muster.pipe.wires.channels import Arrival, Channels
from support.pipelines import Case, wrong_training

pytestmark = pytest.mark.ranks


def only_the_last_counts() -> Any:
    made = WholeGraphPass.backward

    def backward(passage: WholeGraphPass, gradient: Tensor) -> Tensor | None:
        return made(passage, gradient if passage.microbatch == 3 else torch.zeros_like(gradient))

    return mock.patch.object(WholeGraphPass, "backward", backward)


def all_count_as_whole_batches() -> Any:
    """The factor 1/m is missing."""
    made = RowExecution._gradient

    def gradient(one: RowExecution, number: int, microbatch: int) -> Tensor | None:
        found = made(one, number, microbatch)
        return torch.ones_like(found) if number == one.last_stage and found is not None else found

    return mock.patch.object(RowExecution, "_gradient", gradient)


def all_count_alike() -> Any:
    """The factor is 1/m instead of the share of the samples."""

    class Alike(run.BatchParts):
        @property
        def weights(self) -> list[float]:  # type: ignore[override]
            return [1 / len(self.inputs)] * len(self.inputs)

    return mock.patch.object(run, "BatchParts", Alike)


def two_are_swapped() -> Any:
    """A micro-batch gets the targets of another."""
    made = torch.split

    def split(tensor: Tensor, lengths: list[int]) -> Any:
        first, second, *rest = made(tensor, lengths)
        return (second, first, *rest) if tensor.dtype == torch.int64 else (first, second, *rest)

    return mock.patch.object(torch, "split", split)


def cut_short() -> Any:
    """The last micro-batch has no backward."""

    def row(*arguments: Any, **settings: Any) -> RankOperations:
        made = row_of(*arguments, **settings)
        if settings.get("forwards_only"):
            return made

        def left_out(step: Any) -> bool:
            late = step.microbatch == arguments[2] - 1
            return late and (getattr(step, "kind", "F") != "F" or getattr(step, "what", "") == "gradient")

        operations = tuple(each for each in made.operations if not left_out(each.step))
        return made._replace(
            operations=operations, receives=tuple(each for each in made.receives if not left_out(each))
        )

    return mock.patch.object(pipeline, "row_of", row)


def buffers_given_back_too_soon() -> Any:
    def handed(tensor: Tensor | None, learns: bool, arrival: Arrival | None) -> StageInput:
        return StageInput(tensor, learns, None)

    made = Channels.wait

    def wait(channels: Channels, step: Any) -> Arrival:
        arrival = made(channels, step)
        if arrival.buffer is not None:
            channels.release(arrival)
        return arrival

    @contextmanager
    def both() -> Iterator[None]:
        with mock.patch.object(Channels, "wait", wait), mock.patch.object(run, "StageInput", handed):
            yield

    return both()


def gradients_left_in_messages() -> Any:
    return mock.patch.object(run, "_make_own", return_value=[])


def gradients_copied_to_other_strides() -> Any:
    made = Channels.send

    def send(channels: Channels, step: Any, tensor: Tensor | None, *, learns: bool) -> None:
        made(channels, step, None if tensor is None else tensor.contiguous(), learns=learns)

    return mock.patch.object(Channels, "send", send)


def counted_twice() -> Any:
    return mock.patch.object(BufferSnapshot, "as_they_were", return_value=nullcontext())


def tied_by_ranks() -> Any:
    """A tied weight's gradients are summed by use, not by micro-batch."""
    return mock.patch.object(pipeline, "_use_of", return_value=None)


def drawn_anew() -> Any:
    return mock.patch.object(Stage, "_layer", drawn_layer)


def drawn_layer(one: Stage, index: int, x: Tensor, _: int) -> Tensor:
    output: Tensor = one.layers[index](x)
    return output


MUTATIONS: dict[str, tuple[Callable[[], Any], Case]] = {
    "only the last": (only_the_last_counts, Case("odd", "1f1b", 4, (8,))),
    "1/m missing": (all_count_as_whole_batches, Case("odd", "1f1b", 4, (8,))),
    "uneven alike": (all_count_alike, Case("odd", "1f1b", 4, (9,))),
    "swapped": (two_are_swapped, Case("odd", "1f1b", 4, (8,))),
    "cut short": (cut_short, Case("odd", "gpipe", 4, (8,))),
    "buffers": (buffers_given_back_too_soon, Case("gpt", "gpipe", 4, (8,))),
    "in messages": (gradients_left_in_messages, Case("odd", "1f1b", 5, (5,), {"cuts": [0, 7]})),
    "strides": (gradients_copied_to_other_strides, Case("odd", "gpipe", 4, (12, 12), {"cuts": [0, 2]})),
    "counted twice": (counted_twice, Case("vgg", "gpipe", 2, (4,), {"recompute": True})),
    "tied by ranks": (tied_by_ranks, Case("gpt tied", "1f1b", 4, (8,), {"exact": True})),
    "drawn anew": (drawn_anew, Case("gpt", "1f1b", 2, (4,))),
}


def wrong(world: World) -> dict[str, bool]:
    found = {}
    for name, (mutation, case) in MUTATIONS.items():
        with mutation():
            found[name] = bool(wrong_training(world, case))
    return found


def test_every_mistake_is_reported(on_ranks):
    found = on_ranks(2, wrong)
    assert [name for name in MUTATIONS if not any(each[name] for each in found)] == []


def right(world: World) -> list[str]:
    return [
        each for case in {str(c): c for _, c in MUTATIONS.values()}.values() for each in wrong_training(world, case)
    ]


def test_without_a_mistake_nothing_is_reported(on_ranks):
    assert on_ranks(2, right) == [[]] * 2
