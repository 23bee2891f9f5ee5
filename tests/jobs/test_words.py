import pytest

from muster.jobs.basics.words import counted, unknown


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_a_noun_agrees_with_its_number(number: int, text: str) -> None:
    assert counted(number, "rank") == text


def test_a_noun_that_hisses_gets_es() -> None:
    counts = counted(2, "process"), counted(4, "micro-batch"), counted(2, "epoch")
    assert counts == ("2 processes", "4 micro-batches", "2 epochs")


@pytest.mark.parametrize(
    ("name", "valid", "near"),
    [
        ("modle", ("mode", "model"), "model"),  # two letters swapped
        ("1F1B", ("gpipe", "1f1b"), "1f1b"),
        ("dpp", ("ddp", "single"), "ddp"),
        ("zzz", ("mode", "model"), ""),
        ("ddp,single", ("ddp", "single"), ""),  # to propose one of several would be a guess
    ],
)
def test_the_nearest_name_is_proposed(name: str, valid: tuple[str, ...], near: str) -> None:
    hint = f"; did you mean {near!r}?" if near else ""
    assert unknown("mode", name, valid) == f"unknown mode {name!r}{hint} (valid: {', '.join(valid)})"
