from itertools import product

import pytest
import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.modes import Parallel
from muster.jobs.world.world import World, check_interfaces
from muster.pipe.mesh import Mesh


def test_an_interface_that_is_not_there_is_refused_before_gloo_fails_over_it() -> None:
    with pytest.raises(
        RefusedError, match=r"^environment: GLOO_SOCKET_IFNAME=nope0: .* has no interface 'nope0'; .*lo"
    ):
        check_interfaces("nope0")
    with pytest.raises(RefusedError, match="nope1"):
        check_interfaces("lo,nope1")


@pytest.mark.parametrize("named", ["lo", "lo,lo", ""])
def test_interfaces_that_are_there_pass(named: str) -> None:
    check_interfaces(named)


@pytest.mark.parametrize(("data", "pipe", "tensor"), list(product((1, 2, 3), repeat=3)))
def test_ranks_have_the_places_that_the_mesh_gives_them(data: int, pipe: int, tensor: int) -> None:
    mesh, split = Mesh(data, pipe, tensor), Parallel(data, pipe, tensor)
    for rank in range(mesh.ranks):
        world = World(rank, mesh.ranks, None, torch.device("cpu"), pipe, tensor)
        places = {"data": mesh.data_rank(rank), "pipe": mesh.pipe_rank(rank), "tensor": mesh.tensor_rank(rank)}
        assert {"data": world.data_rank, "pipe": world.pipe_rank, "tensor": world.tensor_rank} == places
        assert world.data_ranks == data
        assert split.places(rank) == {axis: each for axis, each in places.items() if getattr(mesh, axis) > 1}
        assert [world.rank_at(each) for each in range(pipe)] == mesh.ranks_of("pipe", rank)
        assert world.readers(range(mesh.ranks)) == range(mesh.ranks)[: data * tensor : tensor]
        assert [mesh.data_rank(each) for each in world.readers(range(mesh.ranks))] == list(range(data))
