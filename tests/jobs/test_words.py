import pytest

from muster.jobs.basics.words import counted, unknown


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_a_noun_agrees_with_its_number(number: int, text: str) -> None:
    assert counted(number, "rank") == text


def test_a_noun_that_hisses_gets_es() -> None:
    counts = counted(2, "process"), counted(4, "micro-batch"), counted(2, "epoch")
    assert counts == ("2 processes", "4 micro-batches", "2 epochs")


def test_a_name_in_other_capitals_is_found() -> None:
    assert (
        unknown("mode", "1F1B", ("gpipe", "1f1b")) == "unknown mode '1F1B'; did you mean '1f1b'? (valid: gpipe, 1f1b)"
    )
