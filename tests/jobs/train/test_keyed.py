import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.train.rng.keyed import bits, key, permutation, uniform_ints

WORD = st.integers(min_value=-(2**63), max_value=2**63 - 1)
SEED = st.integers(min_value=0, max_value=2**63 - 1)


def test_a_key_of_one_number_is_the_first_output_of_splitmix64():
    # The published outputs for the seeds 0 and 1234567, less their lowest bit.
    assert key(0) == 0xE220A8397B1DCDAF >> 1
    assert key(1234567) == 6457827717110365317 >> 1


@given(seed_key=SEED, index=st.lists(WORD, min_size=1, max_size=20), draw=st.integers(0, 1000))
def test_the_bits_of_a_tensor_are_the_keys_of_its_numbers(seed_key: int, index: list[int], draw: int):
    found = bits(seed_key, torch.tensor(index), draw)
    assert found.tolist() == [key(seed_key, draw, number) for number in index]
    assert found.dtype == torch.int64
    assert int(found.min()) >= 0


@given(parts=st.lists(WORD, min_size=2, max_size=4, unique=True))
def test_the_order_and_number_of_parts_matter(parts: list[int]):
    assert key(*parts) != key(*reversed(parts))
    assert key(*parts) != key(*parts[:-1])
    assert 0 <= key(*parts) < 2**63


def test_bits_keep_the_shape_and_do_not_depend_on_what_is_drawn_beside():
    index = torch.arange(12).view(3, 4)
    whole = bits(7, index, 1)
    assert whole.shape == (3, 4)
    assert torch.equal(bits(7, index[1, 2:], 1), whole[1, 2:])


def test_every_bit_is_set_half_of_the_time():
    drawn = bits(key(3), torch.arange(20_000), 0)
    share = torch.stack([(drawn >> bit & 1).double().mean() for bit in range(63)])
    assert float((share - 0.5).abs().max()) < 0.02  # 5.6 standard deviations


def test_uniform_ints_are_even_and_differ_between_draws():
    first, second = (uniform_ints(key(3), torch.arange(90_000), draw, 9) for draw in (0, 1))
    counts = torch.bincount(first, minlength=9)
    assert len(counts) == 9
    assert int((counts - 10_000).abs().max()) < 500  # 5 standard deviations
    assert abs(float((first == second).double().mean()) - 1 / 9) < 0.01


@given(seed=SEED, epoch=st.integers(0, 1000), samples=st.integers(1, 300))
def test_a_permutation_visits_every_sample_once(seed: int, epoch: int, samples: int):
    assert sorted(permutation(seed, epoch, samples).tolist()) == list(range(samples))


def test_a_permutation_is_a_function_of_seed_and_epoch_only():
    reference = permutation(1, 2, 1437)
    torch.manual_seed(99)
    torch.rand(3)
    assert torch.equal(permutation(1, 2, 1437), reference)
    assert not torch.equal(permutation(1, 3, 1437), reference)
    assert not torch.equal(permutation(2, 2, 1437), reference)


def test_a_permutation_sorts_the_keys_of_the_samples():
    assert permutation(5, 0, 50).tolist() == sorted(range(50), key=lambda sample: key(key(5, 1, 0), 0, sample))


def test_permutations_of_two_epochs_agree_as_rarely_as_chance():
    matches = sum(int((permutation(0, epoch, 1000) == permutation(0, epoch + 1, 1000)).sum()) for epoch in range(50))
    assert matches < 100  # one place in 1000 agrees by chance: 50 expected
