"""A mesh of ranks in three dimensions: unique coordinates, and groups of ranks that differ in one dimension only."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from muster.jobs.world.world import World
from muster.pipe.mesh import AXES, Mesh

SIZES = [Mesh(*each) for each in product((1, 2, 3), repeat=3)]


@pytest.mark.parametrize("mesh", SIZES, ids=str)
def test_every_rank_has_one_place_and_every_place_one_rank(mesh):
    places = [(mesh.data_rank(rank), mesh.pipe_rank(rank), mesh.tensor_rank(rank)) for rank in range(mesh.ranks)]
    assert sorted(places) == sorted(product(range(mesh.data), range(mesh.pipe), range(mesh.tensor)))
    assert [mesh.rank_at(data=data, pipe=pipe, tensor=tensor) for data, pipe, tensor in places] == [*range(mesh.ranks)]


@pytest.mark.parametrize("mesh", SIZES, ids=str)
def test_groups_of_an_axis_part_the_world_and_differ_in_that_axis_only(mesh):
    for axis, size in (("data", mesh.data), ("pipe", mesh.pipe), ("tensor", mesh.tensor)):
        groups = {tuple(mesh.ranks_of(axis, rank)) for rank in range(mesh.ranks)}
        assert sorted(rank for group in groups for rank in group) == [*range(mesh.ranks)]
        for group in groups:
            found = {other: {getattr(mesh, f"{other}_rank")(rank) for rank in group} for other in AXES[:3]}
            assert {other for other in found if len(found[other]) > 1} <= {axis}
            assert [getattr(mesh, f"{axis}_rank")(rank) for rank in group] == [*range(size)]
    for rank in range(mesh.ranks):
        model = mesh.ranks_of("model", rank)
        assert model == [each for each in range(mesh.ranks) if mesh.data_rank(each) == mesh.data_rank(rank)]


def test_the_drawing_is_what_ranks_are():
    mesh = Mesh(data=2, pipe=2, tensor=2)
    assert [mesh.ranks_of(axis, 5) for axis in ("tensor", "data", "pipe", "model")] == [
        [4, 5],
        [5, 7],
        [1, 5],
        [0, 1, 4, 5],
    ]


def sums(world: World) -> list[list[float]]:
    """Return for three meshes and every axis the sum of ranks within this rank's group; also check errors."""
    found = []
    for mesh in (Mesh(2, 2, 1), Mesh(1, 2, 2), Mesh(4, 1, 1)):
        groups = mesh.groups(world.group)
        row = []
        for axis in AXES:
            total = torch.tensor([float(world.rank)])
            dist.all_reduce(total, group=getattr(groups, axis))
            row.append(total.item())
        found.append(row)
    with pytest.raises(ValueError, match=r"data 2 x pipe 1 x tensor 3 = 6 ranks, but the world has 4"):
        Mesh(2, 1, 3).groups(world.group)
    assert Mesh(4, 1, 1).groups(world.group).data is world.group
    return found


@pytest.mark.ranks
def test_groups_talk_among_themselves(on_ranks):
    meshes = (Mesh(2, 2, 1), Mesh(1, 2, 2), Mesh(4, 1, 1))
    wanted = [[[float(sum(mesh.ranks_of(axis, rank))) for axis in AXES] for mesh in meshes] for rank in range(4)]
    assert on_ranks(4, sums) == wanted


def within_a_part(world: World) -> list[float]:
    """Create the groups of a mesh over two of four ranks; numbers count within that part."""
    part = dist.new_group([2, 3])
    if world.rank < 2:
        return []
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=Mesh(tensor=2).groups(part).tensor)
    alone = torch.tensor([float(world.rank)])
    dist.all_reduce(alone, group=Mesh(data=2).groups(part).tensor)
    return [total.item(), alone.item()]


@pytest.mark.ranks
def test_a_mesh_may_be_a_part_of_the_world(on_ranks):
    assert on_ranks(4, within_a_part) == [[], [], [5.0, 2.0], [5.0, 3.0]]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_dimensions_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        Mesh(*sizes)
