"""Node lists: Slurm's and pdsh's notation, there and back."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import UsageError
from muster.jobs.hosts.nodelist import MAX_NAMES, expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n01", ["n01"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[1,3-4,7]-ib,login", ["n1-ib", "n3-ib", "n4-ib", "n7-ib", "login"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        (" a , b,a ", ["a", "b"]),
        ("n[98-100].local", ["n98.local", "n99.local", "n100.local"]),
        ("[1-2]", ["1", "2"]),
        ("n[0-1][0-1]", ["n00", "n01", "n10", "n11"]),
        ("n[01,1]", ["n01", "n1"]),
        ("a[1-2]b[3,5-6]c,d", ["a1b3c", "a1b5c", "a1b6c", "a2b3c", "a2b5c", "a2b6c", "d"]),
        ("[0-1]-[08-09]-x", ["0-08-x", "0-09-x", "1-08-x", "1-09-x"]),
        ("alice@n[1-2]:4", ["alice@n1:4", "alice@n2:4"]),
    ],
)
def test_a_node_list_expands_in_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n08", "n9"], "n[08,9]"),
        (["n3", "n2", "n1"], "n[3,2,1]"),
        (["b1", "a1", "a2", "b2"], "b1,a[1-2],b2"),
        (["rack1n01", "rack1n02", "rack2n01", "rack2n02"], "rack[1-2]n[01-02]"),
        (["n1-ib", "n2-ib", "n1"], "n[1-2]-ib,n1"),
        (["n1", "n1", "n2"], "n[1-2]"),
        (["a1b1", "a2b2"], "a1b1,a2b2"),
        (["n99", "n100", "n101"], "n[99-101]"),
        (["n099", "n100"], "n[099-100]"),
    ],
)
def test_names_fold_to_the_short_list_without_reordering(names: list[str], text: str) -> None:
    assert fold(names) == text


words = st.text(st.characters(codec="utf-8", exclude_characters=",[]"), min_size=1, max_size=6).filter(
    lambda name: not any(letter.isspace() for letter in name)
)
hosts = st.builds(
    lambda prefix, number, width, suffix: f"{prefix}{number:0{width}}{suffix}",
    st.sampled_from(["n", "r1n", ""]),
    st.integers(0, 120),
    st.integers(0, 3),
    st.sampled_from(["", "-ib", "x2"]),
)


@given(st.lists(words | hosts, min_size=1, max_size=30))
def test_expanding_what_was_folded_gives_the_names_in_first_seen_order(names: list[str]) -> None:
    assert expand(fold(names)) == list(dict.fromkeys(names))


numbers = st.integers(0, 30).flatmap(
    lambda first: st.builds(
        lambda more, width: (first, first + more, max(width, len(str(first)))), st.integers(0, 12), st.integers(1, 3)
    )
)
brackets = st.lists(numbers, min_size=1, max_size=3)


@given(
    st.lists(st.tuples(st.sampled_from(["n", "r-", ""]), brackets), min_size=1, max_size=3), st.sampled_from(["", "x"])
)
def test_brackets_stand_for_all_their_combinations_the_last_counting_fastest(
    parts: list[tuple[str, list[tuple[int, int, int]]]], suffix: str
) -> None:
    text, choices = "", []
    for prefix, ranges in parts:
        # Where the end is longer than the padding, the list must say so itself: [8-11] but [08-11].
        fitting = [(first, last, width) for first, last, width in ranges if width == 1 or len(str(last)) <= width]
        spelt = fitting or [(1, 2, 1)]
        text += prefix + "[" + ",".join(f"{a:0{w}}-{max(a, b):0{w}}" for a, b, w in spelt) + "]"
        choices.append([f"{prefix}{number:0{w}}" for a, b, w in spelt for number in range(a, max(a, b) + 1)])
    names = ["".join(pieces) + suffix for pieces in product(*choices)]
    assert expand(text + suffix) == list(dict.fromkeys(names))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("n[1", "the bracket at character 2 is unmatched"),
        ("n1]", "the bracket at character 3 is unmatched"),
        ("n[1,[2-3]]", "the bracket at character 2 is unmatched, or inside another bracket"),
        ("n[3-1]", r"\[3-1\] is reversed; write \[1-3\]"),
        ("n[10-9]", r"\[10-9\] is reversed; write \[9-10\]"),
        ("n[1-03]", "different widths"),
        ("n[001-3]", r"different widths; write \[001-003\]"),
        ("n[a-b]", "is not a number or a range"),
        ("n[]", "is not a number or a range"),
        ("n[1-2-3]", "is not a number or a range"),
        ("n[²]", "is not a number or a range"),
        ("a,,b", "no name before character 3"),
        ("a,", "no name before character 3"),
        ("a b", "a space in 'a b'"),
        ("n[1-100001]", "more than 100,000 names"),
        ("n[1-999999999999999999]", "more than 100,000 names"),
        ("n[1-400]m[1-400]", "more than 100,000 names"),
    ],
)
def test_a_malformed_list_is_refused_and_says_why(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        expand(text)


def test_the_largest_list_is_taken() -> None:
    assert len(expand(f"n[1-{MAX_NAMES}]")) == MAX_NAMES


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a[1", "a\n"])
def test_what_is_no_name_cannot_be_folded(name: str) -> None:
    with pytest.raises(UsageError, match="is not a name"):
        fold(["n1", name])
