"""Modes: what each row expands to, and what it promises."""

import dataclasses

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.modes import MODES, PIPELINES, SHARDED, TENSOR, Parallel, mode_of


@pytest.mark.parametrize("name", [name for name in MODES if name != "single"])
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_every_mode_uses_every_rank(name: str, world_size: int) -> None:
    assert MODES[name].expand(world_size).world_size == world_size


@pytest.mark.parametrize("name", [name for name in MODES if name not in ("single", TENSOR, *SHARDED, *PIPELINES)])
def test_data_parallel_modes_differ_in_their_synchronization_alone(name: str) -> None:
    assert MODES[name].expand(4) == Parallel(data=4, pipe=1, tensor=1, zero=0, sync=name)  # type: ignore[arg-type]


def test_modes_that_share_state_out_name_what_is_shared_and_by_whom() -> None:
    assert {name: (MODES[name].expand(4).zero, MODES[name].expand(4).sync) for name in SHARDED} == {
        "zero1": (1, "sharded"),
        "zero2": (2, "sharded"),
        "zero3": (3, "sharded"),
        "fsdp": (3, "fsdp"),
    }


@pytest.mark.parametrize("name", MODES)
def test_every_split_has_the_mode_that_it_came_from(name: str) -> None:
    assert mode_of(MODES[name].expand(2 if name == TENSOR else 1)) == name


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_have_a_slice_of_the_model_on_every_rank(name: str) -> None:
    assert MODES[name].expand(4) == Parallel(data=1, pipe=4, schedule=name)  # type: ignore[arg-type]


def test_split_layers_go_by_that_name_however_gradients_are_averaged() -> None:
    assert MODES[TENSOR].expand(4) == Parallel(tensor=4)
    assert mode_of(Parallel(data=2, tensor=2, sync="sharded", zero=1)) == TENSOR
    assert mode_of(Parallel(pipe=2, tensor=2, schedule="1f1b")) == "1f1b"


def test_single_runs_on_one_rank_only() -> None:
    assert MODES["single"].expand(1) == Parallel()
    with pytest.raises(RefusedError, match="single runs on one rank, this job has 2; set nodes: 1"):
        MODES["single"].expand(2)


@pytest.mark.parametrize(
    ("name", "promises"),
    #                  on 1       on 2       on 3 ranks
    [
        ("single", ["bitwise", "bitwise", "bitwise"]),
        ("gather_scatter", ["bitwise", "bitwise", "bitwise"]),
        ("allreduce", ["bitwise", "bitwise", "tight"]),
        *((name, ["bitwise", "bitwise", "bitwise"]) for name in ("model", "gpipe", "1f1b", "interleaved")),
        *((name, ["bitwise", "tight", "tight"]) for name in ("zb1p", "zbv")),  # weights' gradients in one sum
        (TENSOR, ["bitwise", "near", "near"]),
        # divided before they are added: three thirds need not make one
        *((name, ["bitwise", "tight", "tight"]) for name in ("flat", "overlap", "bucketed", "ddp", *SHARDED)),
    ],
)
def test_a_mode_promises_no_more_than_its_sums_allow(name: str, promises: list[str]) -> None:
    assert [MODES[name].exactness(world_size) for world_size in (1, 2, 3)] == promises


def test_only_modes_whose_sums_are_ours_can_be_exact() -> None:
    exact = [name for name, mode in MODES.items() if mode.can_be_exact]
    data = ["gather_scatter", "allreduce", "flat", "overlap", "bucketed", "zero1", "zero2", "zero3"]
    assert exact == [*data, *PIPELINES]


def test_rows_are_named_as_their_keys() -> None:
    assert all(mode.name == name and mode.phrase for name, mode in MODES.items())


def test_a_split_is_frozen_and_multiplies_its_degrees() -> None:
    split = Parallel(data=2, pipe=3, tensor=4)
    assert split.world_size == 24
    with pytest.raises(dataclasses.FrozenInstanceError):
        split.data = 1  # type: ignore[misc]
