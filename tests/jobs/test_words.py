import pytest

from jobs.words import counted


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_a_noun_agrees_with_its_number(number: int, text: str) -> None:
    assert counted(number, "rank") == text
