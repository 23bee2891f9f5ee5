"""Dealing samples: every sample once in an epoch, on any number of ranks, whatever was interrupted."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.sampler import Sampler, samples_of


def make(samples: int, batch_size: int, rank: int, ranks: int, *, drop_last: bool = False, seed: int = 0) -> Sampler:
    return Sampler(samples, batch_size, rank=rank, ranks=ranks, shuffle=True, seed=seed, drop_last=drop_last)


def samplers(samples: int, batch_size: int, ranks: int, **more) -> list[Sampler]:
    return [make(samples, batch_size, rank, ranks, **more) for rank in range(ranks)]


@given(
    samples=st.integers(8, 60), batch=st.integers(1, 7), ranks=st.integers(1, 8), then=st.integers(1, 8), data=st.data()
)
def test_every_sample_of_an_epoch_comes_once_even_if_other_ranks_finish_it(samples, batch, ranks, then, data) -> None:
    first = samplers(samples, batch, ranks)
    steps = data.draw(st.integers(0, len(first[0])))
    used: Counter[int] = Counter()
    for sampler in first:
        for indices in list(sampler)[:steps]:
            used.update(indices)
    for sampler in first:
        sampler.advance(steps)
    assert len({(each.epoch, each.position) for each in first}) == 1
    assert sum(used.values()) == first[0].position, "the position counts what all ranks have used"

    others = samplers(samples, batch, then)
    for sampler in others:
        sampler.load_state_dict(first[0].state_dict())
    left = samples - first[0].position
    lengths = set()
    if not others[0].is_done:
        for sampler in others:
            batches = list(sampler)
            lengths.add(len(batches))
            for indices in batches:
                used.update(indices)
    assert len(lengths) <= 1, "all ranks take as many steps"
    assert set(used) == set(range(samples))
    repeated = sum(used.values()) - samples
    assert repeated == (then - left if 0 < left < then else 0)


@given(samples=st.integers(4, 40), batch=st.integers(1, 5), ranks=st.integers(1, 4))
def test_the_length_is_the_number_of_batches_and_a_batch_has_at_least_one_sample(samples, batch, ranks) -> None:
    for sampler in samplers(samples, batch, ranks):
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert all(batches)


def test_dropping_the_last_batch_leaves_full_ones_only() -> None:
    for sampler in samplers(11, 2, 2, drop_last=True):
        assert [len(each) for each in sampler] == [2, 2] == [2] * len(sampler)


def test_an_iteration_after_a_complete_epoch_is_the_next_epoch_in_another_order() -> None:
    sampler = make(32, 4, 0, 1)
    epochs = []
    for _ in range(2):
        epochs.append([index for batch in sampler for index in batch])
        sampler.advance(len(sampler))
    assert sampler.epoch == 1
    assert sampler.is_done
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(32))
    assert epochs[0] != epochs[1]


def test_reading_ahead_does_not_move_the_position() -> None:
    sampler = make(32, 4, 0, 1)
    ahead = iter(sampler)
    for _ in range(5):
        next(ahead)
    assert sampler.position == 0


def test_other_data_or_another_seed_is_refused() -> None:
    saved = make(32, 4, 0, 1).state_dict()
    with pytest.raises(
        RefusedError, match=r"saved with samples 32, but this program has 33; use the same data and seed"
    ):
        make(33, 4, 0, 1).load_state_dict(saved)
    with pytest.raises(RefusedError, match="saved with seed 0, but this program has 1"):
        make(32, 4, 0, 1, seed=1).load_state_dict(saved)


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(RefusedError, match="3 samples are too few for 4 ranks with a batch of 2; use fewer ranks"):
        make(3, 2, 0, 4)
    with pytest.raises(RefusedError, match="batch_size must be at least 1, got 0"):
        make(3, 0, 0, 1)
    with pytest.raises(RefusedError, match="generator has no length"):
        samples_of(each for each in range(3))
    assert samples_of([1, 2, 3]) == samples_of(3) == 3
