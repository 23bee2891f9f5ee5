"""Parts of a data set: every sample once, in the same parts everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.ddp import DataPartitioner
from muster.ddp.partition import partitions


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 5))
def test_equal_parts_have_every_sample_once(samples: int, ranks: int, seed: int) -> None:
    parts = partitions(samples, [1 / ranks] * ranks, seed)
    assert sorted(index for part in parts for index in part) == list(range(samples))
    assert all(len(part) >= samples // ranks for part in parts)


def test_the_usual_interface() -> None:
    data = [f"sample {number}" for number in range(10)]
    parts = DataPartitioner(data, sizes=[0.7, 0.2, 0.1], seed=1234)
    assert [len(parts.use(number)) for number in range(3)] == [7, 2, 1]
    assert sorted(parts.use(number)[index] for number in range(3) for index in range(len(parts.use(number)))) == data
    assert [[*map(int, part)] for part in parts.partitions] == DataPartitioner(data).partitions
    assert parts.partitions != DataPartitioner(data, seed=5).partitions
    assert parts.partitions[0] != sorted(parts.partitions[0])


def test_a_loader_reads_a_part() -> None:
    from torch.utils.data import DataLoader

    part = DataPartitioner(range(8), [0.5, 0.25]).use(1)
    (batch,) = DataLoader(part, batch_size=4)
    assert batch.tolist() == [part[0], part[1]]


@pytest.mark.parametrize("sizes", [[], [0.5, -0.1], [0.7, 0.4], [0.0]])
def test_sizes_that_are_no_shares_are_refused(sizes: list[float]) -> None:
    with pytest.raises(ValueError, match="sizes must be positive shares that add up to at most 1, got"):
        DataPartitioner(range(10), sizes)
