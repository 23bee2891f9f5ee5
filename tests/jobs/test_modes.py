"""Modes: what each row expands to, and what it promises."""

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.modes import MODES, PIPELINES, SHARDED, TENSOR, Parallel, mode_of

SPLITS = {  # of 4 ranks
    **{name: Parallel(data=4, sync=name) for name in ("gather_scatter", "allreduce", "flat", "overlap", "bucketed")},
    "ddp": Parallel(data=4, sync="ddp"),
    **{f"zero{stage}": Parallel(data=4, zero=stage, sync="sharded") for stage in (1, 2, 3)},
    "fsdp": Parallel(data=4, zero=3, sync="fsdp"),
    **{name: Parallel(pipe=4, schedule=name) for name in PIPELINES},
    TENSOR: Parallel(tensor=4),
}


@pytest.mark.parametrize("name", [name for name in MODES if name != "single"])
def test_every_mode_is_a_split_over_all_ranks_that_has_its_name(name: str) -> None:
    assert MODES[name].expand(4) == SPLITS[name]
    assert [MODES[name].expand(ranks).world_size for ranks in (1, 2, 7)] == [1, 2, 7]
    assert mode_of(MODES[name].expand(2 if name == TENSOR else 1)) == name


def test_split_layers_go_by_that_name_however_gradients_are_averaged() -> None:
    assert mode_of(Parallel(data=2, tensor=2, sync="sharded", zero=1)) == TENSOR
    assert mode_of(Parallel(pipe=2, tensor=2, schedule="1f1b")) == "1f1b"


def test_single_runs_on_one_rank_only() -> None:
    assert MODES["single"].expand(1) == Parallel()
    assert mode_of(Parallel()) == "single"
    with pytest.raises(RefusedError, match="single runs on one rank, but this job has 2; set nodes: 1"):
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
        ("terapipe", ["near", "near", "near"]),
        # divided before they are added: three thirds need not make one
        *((name, ["bitwise", "tight", "tight"]) for name in ("flat", "overlap", "bucketed", "ddp", *SHARDED)),
    ],
)
def test_a_mode_promises_no_more_than_its_sums_allow(name: str, promises: list[str]) -> None:
    assert [MODES[name].exactness(world_size) for world_size in (1, 2, 3)] == promises


def test_only_modes_whose_sums_are_ours_can_be_exact() -> None:
    exact = [name for name, mode in MODES.items() if mode.can_be_exact]
    data = ["gather_scatter", "allreduce", "flat", "overlap", "bucketed", "zero1", "zero2", "zero3"]
    assert exact == [*data, *(name for name in PIPELINES if name != "terapipe")]


def test_rows_are_named_as_their_keys() -> None:
    assert all(mode.name == name and mode.phrase for name, mode in MODES.items())


def test_a_split_multiplies_its_degrees() -> None:
    assert Parallel(data=2, pipe=3, tensor=4).world_size == 24
