"""Mistakes that a wrapper refuses with a message, on every rank, before anything can hang."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster import ddp
from muster.ddp.checks import first_difference, head_of, length_of, ranks_in_words, whole_text
from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS, backwards, wrap
from support.data_parallel_models import CASES, ToyModel
from support.refusals import said_by

pytestmark = pytest.mark.ranks


def wrapped_twice(world: World) -> dict:
    said = {}
    for wrapper in WRAPPERS:
        wrap_it = getattr(ddp, wrapper)
        module = ToyModel()
        model = wrap_it(module, world.group)
        shares = nn.Linear(20, 5)
        shares.weight = module.fc2.weight
        said[wrapper] = [
            said_by(lambda: wrap_it(each, world.group), ValueError)  # noqa: B023 - called at once
            for each in (model, nn.Sequential(model), module, module.fc2, shares)
        ]
        del model
        wrap_it(module, world.group)  # no other wrapper averages it any more
    return said


def test_wrapping_twice_is_refused_as_long_as_the_first_wrapper_lives(on_ranks):
    (said,) = on_ranks(1, wrapped_twice)
    twice = "gradients would be averaged twice"
    for wrapper in WRAPPERS:
        still = f"belongs to a {wrapper} that is still in use: {twice}; use that {wrapper}, or delete it first"
        assert said[wrapper] == [
            f"the module is already a {wrapper}: {twice}; wrap the plain module (its `.module`)",
            f"its part '0' is already a {wrapper}: {twice}; wrap the plain module (its `.module`)",
            f"the module {still}",
            f"the module {still}",
            f"parameter 'weight' {still}",
        ]


def wrapped_by_torch(world: World) -> str:
    inner = nn.parallel.DistributedDataParallel(ToyModel(), process_group=world.group)
    return said_by(lambda: ddp.BucketedDDP(nn.Sequential(inner), world.group), ValueError)


def test_a_module_that_torch_averages_already_is_refused(on_ranks):
    (said,) = on_ranks(1, wrapped_by_torch)
    assert said.startswith("its part '0' is already a DistributedDataParallel")


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "expanded": lambda: torch.zeros(1).expand(5),
    "not there": lambda: torch.zeros(3, device="meta"),
    "lazy": lambda: nn.parameter.UninitializedBuffer(),
}


def odd_tensors(world: World) -> dict[str, str]:
    said = {}
    for odd, build in ODD.items():
        module = ToyModel()
        module.norm.register_buffer("odd", build())
        said[odd] = said_by(lambda: ddp.BucketedDDP(module, world.group), ValueError)  # noqa: B023 - called at once
    said["lazy parameter"] = said_by(lambda: ddp.AllReduce(nn.LazyLinear(3), world.group), ValueError)
    return said


def test_a_parameter_or_buffer_that_cannot_be_sent_is_named(on_ranks):
    wanted = {
        "sparse": "buffer 'norm.odd' is torch.sparse_coo, expected a dense tensor: convert it, or make it a plain "
        "attribute of the module",
        "expanded": "buffer 'norm.odd' has elements that share memory, as after expand(): clone() it",
        "not there": "buffer 'norm.odd' is on the meta device, without values: call to_empty() and initialize it "
        "before wrapping",
        "lazy": "buffer 'norm.odd' has no shape yet: call the module once before wrapping it",
        "lazy parameter": "parameter 'weight' has no shape yet: call the module once before wrapping it",
    }
    assert on_ranks(2, odd_tensors) == [wanted] * 2


def in_a_group_of_others(world: World) -> str:
    group = dist.new_group([1])
    said = said_by(lambda: ddp.AllReduce(ToyModel(), group), ValueError)
    dist.barrier()
    return said


def test_a_group_without_this_rank_is_refused(on_ranks):
    outside, inside = on_ranks(2, in_a_group_of_others)
    assert outside == (
        "rank 0 is not in the given process group: wrap only on the ranks passed to new_group(), or pass a group that "
        "contains this rank"
    )
    assert inside == "nothing was raised"


def test_no_group_at_all_is_refused():
    with pytest.raises(ValueError, match=r"no process group is initialized: call torch\.distributed\.init_process"):
        ddp.BucketedDDP(ToyModel())


def with_a_number_for_a_group(world: World) -> str:
    return said_by(lambda: ddp.BucketedDDP(ToyModel(), 25.0), ValueError)


def test_what_is_no_group_is_refused(on_ranks):
    wanted = "process_group must be a ProcessGroup or None, got 25.0: pass other settings by name"
    assert on_ranks(1, with_a_number_for_a_group) == [wanted]


def differing(rank: int, how: str) -> nn.Module:
    toy = ToyModel()
    if rank != 1:
        return toy
    if how == "shape":
        toy.fc2 = nn.Linear(20, 6, bias=False)
    elif how == "dtype":
        toy.norm.double()
    elif how == "count":
        toy.fc2 = nn.Linear(20, 5)
    elif how == "fewer":
        del toy.fc2
    elif how == "frozen":
        toy.norm.bias.requires_grad_(False)
    elif how == "layout":
        toy.fc1.weight = nn.Parameter(torch.empty(10, 20).t())
    elif how == "buffer":
        toy.register_buffer("seen", torch.zeros(3))
    return toy


def refused(world: World, how: str) -> list[str]:
    return [said_by(lambda: getattr(ddp, w)(differing(world.rank, how), world.group), ValueError) for w in WRAPPERS]  # noqa: B023


DIFFERENCES = {
    "shape": ("parameter fc2.weight (5, 20) float32 trainable", "parameter fc2.weight (6, 20) float32 trainable"),
    "dtype": ("parameter norm.weight (20,) float32 trainable", "parameter norm.weight (20,) float64 trainable"),
    "count": ("nothing more", "parameter fc2.bias (5,) float32 trainable"),
    "fewer": ("parameter fc2.weight (5, 20) float32 trainable", "nothing more"),
    "frozen": ("parameter norm.bias (20,) float32 trainable", "parameter norm.bias (20,) float32 frozen"),
    "layout": (
        "parameter fc1.weight (20, 10) float32 trainable",
        "parameter fc1.weight (20, 10) float32 strides (1, 20) trainable",
    ),
    "buffer": ("nothing more", "buffer seen (3,) float32"),
}


@pytest.mark.parametrize("how", DIFFERENCES)
def test_ranks_whose_modules_differ_are_told_where_and_who(on_ranks, how):
    there, here = DIFFERENCES[how]
    for rank, said in enumerate(on_ranks(3, refused, how=how)):
        most, one = ("", " (here)") if rank == 1 else (" (here)", "")
        wanted = (
            f"the ranks' modules or wrappers differ: {there} on ranks 0, 2{most} but {here} on rank 1{one}; "
            "build the same module on every rank, and wrap it in the same way"
        )
        assert said == [wanted] * len(WRAPPERS)


def test_the_first_difference_is_told_with_every_side_of_it():
    sides = {0: ["a", "b"], 4: ["a", "c"], 5: ["a", "b"], 6: ["a", "b"], 7: ["a"]}
    wanted = "b on ranks 0, 5-6 (here) but c on rank 4 but nothing more on rank 7"
    assert first_difference(sides, here=5) == wanted
    assert ranks_in_words([3]) == "rank 3"


def without_gradient(world: World) -> dict:
    case = CASES["never used"]
    return {
        wrapper: said_by(
            lambda: backwards(world, wrap(world, wrapper, "never used", find_unused_parameters=False), case),  # noqa: B023
            RuntimeError,
        )
        for wrapper in WRAPPERS
    }


def test_a_parameter_that_no_rank_uses_is_named_with_what_to_set(on_ranks):
    wanted = (
        "1 of 3 parameters got no gradient on any rank: sometimes; if the loss does not depend on them in every step, "
        "set find_unused_parameters=True; if it never does, call requires_grad_(False) on them before wrapping"
    )
    assert on_ranks(2, without_gradient) == [dict.fromkeys(WRAPPERS, wanted)] * 2


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(1) for _ in range(12))

    def forward(self) -> torch.Tensor:
        return self.parts[0].sum()


def many_without_gradient(world: World) -> str:
    model = ddp.BucketedDDP(Wide(), world.group)
    return said_by(lambda: model().backward(), RuntimeError)


def test_of_many_unused_parameters_some_are_named(on_ranks):
    for said in on_ranks(2, many_without_gradient):
        assert said.startswith("11 of 12 parameters got no gradient on any rank: parts.")
        assert ", parts." in said
        assert " and 3 more; " in said


def misused(world: World) -> list[str]:
    return [
        said_by(wrap(world, "BucketedDDP", "toy").next_shard, RuntimeError),
        said_by(lambda: ddp.BucketedDDP(ToyModel(), world.group, bucket_size_mb=-1.0), ValueError),
        said_by(lambda: wrap(world, "AllReduce", "toy", exact=True, communication_dtype="bfloat16"), ValueError),
    ]


def test_other_misuse_is_refused(on_ranks):
    shards, size, exact = on_ranks(2, misused)[0]
    assert shards == "next_shard() needs a fixed order of additions; build the BucketedDDP with exact=True"
    assert size == "bucket_size_mb must be a number of MB, or None for one bucket, got -1.0"
    assert exact == "exact sums are never cast, but communication_dtype is torch.bfloat16; drop one"


@pytest.mark.parametrize("head", [bytes(72), b"\xff" * 72, head_of(b"text")[:-1] + b"?"])
def test_what_an_aborted_collective_returns_is_no_length(head: bytes) -> None:
    assert length_of(head_of(b"text"))[0] == 4
    with pytest.raises(ConnectionError, match="a rank has aborted it"):
        length_of(head)


def test_what_an_aborted_collective_returns_is_no_text() -> None:
    length, digest = length_of(head_of(b"text"))
    assert whole_text(b"text  ", length, digest) == b"text"
    with pytest.raises(ConnectionError, match="a rank has aborted it"):
        whole_text(b"tex\0  ", length, digest)
