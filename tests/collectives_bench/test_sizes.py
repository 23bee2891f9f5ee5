"""Sizes as people write them, and what is none of them."""

import pytest

from muster.collectives_bench.sizes import LARGEST, parse_size, parse_sizes, size_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8", 8),
        (8, 8),
        ("512K", 512 << 10),
        ("512 KiB", 512 << 10),
        ("36.9MB", round(36.9 * 2**20)),
        ("1g", 1 << 30),
        ("20e9", 20_000_000_000),
        ("64G", LARGEST),
    ],
)
def test_a_size_is_a_number_of_bytes(text, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "1T", "-1", "1e", "1e999", "9" * 400, "nan", "inf", "0x10", "1,5M", True])
def test_what_is_no_size_is_said_so(text) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0.1", "65G", "1e99", 0])
def test_a_size_out_of_range_is_refused(text) -> None:
    with pytest.raises(ValueError, match="must be from 1 byte to 64G"):
        parse_size(text)


def test_a_range_doubles_or_grows_by_its_factor_and_keeps_its_ends_where_it_meets_them() -> None:
    assert parse_sizes("1K:8K") == [1024, 2048, 4096, 8192]
    assert parse_sizes("1K:9K:3") == [1024, 3072, 9216]
    assert parse_sizes("1K:5K:4") == [1024, 4096]
    assert parse_sizes("8:8") == [8]


@pytest.mark.parametrize("text", ["8K:1K", "1:2:1", "1:2:x", "1:2:3:4", "1:", ":1", "1:2:0"])
def test_a_range_that_leads_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|smaller size first|factor|not a size"):
        parse_sizes(text)


def test_lists_have_names() -> None:
    assert [size_text(size) for size in parse_sizes("course")] == [
        "512 KB",
        "1 MB",
        "10 MB",
        "50 MB",
        "100 MB",
        "500 MB",
        "1 GB",
    ]
    assert parse_sizes("small")[0] == 8


def test_a_size_is_written_shortly() -> None:
    assert [size_text(size) for size in (8, 1536, 36.9 * 2**20, 1 << 30)] == ["8 B", "1.5 KB", "36.9 MB", "1 GB"]
