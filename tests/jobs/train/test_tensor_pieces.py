"""A model split over tensor ranks, and by ZeRO besides, is read again by any other number of ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from muster.jobs.checkpoint import commit
from muster.jobs.checkpoint.pieces import whole
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.tensors.parts import DTYPES, TensorPart
from muster.jobs.train.parallel.layers import parts_of
from muster.pipe.tensor.slices import TensorSlice
from support.checkpoints import Saved

CUTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "up": ((12, 5), 0),
    "up.bias": ((12,), 0),
    "down": ((7, 12), 1),
    "norm": ((5,), None),
    "expert": ((3, 12, 4), 1),
}


def content(name: str) -> Tensor:
    shape, _ = CUTS[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + len(name) * 1000


def parts(ranks: int, shards: int, *, filled: bool, answering: bool) -> list[list[TensorPart]]:
    """List what each of `ranks` x `shards` has: `shards` flat ranges, unevenly cut, of each rank's parts."""
    found: list[list[TensorPart]] = []
    for rank in range(ranks):
        for shard in range(shards):
            mine: list[TensorPart] = []
            for name, (shape, dimension) in CUTS.items():
                size = 0 if dimension is None else shape[dimension] // ranks
                cut = TensorSlice(
                    name, shape, dimension, rank * size, rank * size + size, dimension is not None or not rank
                )
                local = content(name)[tuple(slice(*each) for each in cut.box)].reshape(-1)
                start, stop = (local.numel() * each // shards + (0 < each < shards) for each in (shard, shard + 1))
                held = local[start:stop].clone() if filled else torch.full((stop - start,), -1.0, dtype=torch.float64)
                if cut.answers or not answering:
                    mine += parts_of(f"model/{name}", cut, held, start)
            found.append(mine)
    return found


@pytest.mark.parametrize("written", [(1, 1), (2, 1), (4, 3)])
@pytest.mark.parametrize("read", [(1, 1), (1, 3), (2, 3), (4, 1), (3, 2)])
def test_what_some_ranks_wrote_others_read(tmp_path: Path, written, read):
    run = Saved(tmp_path / "run").run
    folder = commit.begin(run, 1, 0)
    writers = parts(*written, filled=True, answering=True)
    for writer, mine in enumerate(writers):
        pieces = [(part.piece, part.tensor.contiguous().numpy().tobytes()) for part in mine]
        write_shard(folder, writer, len(writers), pieces, meta={"step": 1, "losses": [[1, 1.5]]})
    manifest = commit.commit(run, folder, len(writers))
    with CheckpointReader(folder, manifest) as reader:
        for mine, wanted in zip(
            parts(*read, filled=False, answering=False), parts(*read, filled=True, answering=False), strict=True
        ):
            for part, same in zip(mine, wanted, strict=True):
                buffer = bytearray(part.piece.nbytes)
                reader.read_into(part.piece, buffer)
                part.tensor.copy_(torch.frombuffer(buffer, dtype=torch.float64).view(part.piece.extent))
                assert torch.equal(part.tensor, same.tensor)


def test_a_part_is_a_view_and_as_whole_as_it_can_be():
    local = torch.zeros(7, 6, dtype=torch.float64)
    (part,) = parts_of("model/down", TensorSlice("down", (7, 12), 1, 6, 12), local)
    part.tensor.fill_(2.0)
    assert local.eq(2.0).all()
    assert part.piece.box == ((0, 7), (6, 12))
    (flat,) = parts_of("model/up", TensorSlice("up", (12, 5), 0, 6, 12), torch.zeros(6, 5))
    assert flat.piece.flat == (30, 60)
    (all_of_it,) = parts_of("model/norm", TensorSlice("norm", (5,)), torch.zeros(5))
    assert all_of_it.piece == whole("model/norm", DTYPES[torch.float32], (5,))
