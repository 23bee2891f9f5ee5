import pytest

from muster.jobs.basics.words import counted, unknown


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_a_noun_agrees_with_its_number(number: int, text: str) -> None:
    assert counted(number, "rank") == text


def test_a_noun_that_hisses_gets_es() -> None:
    counts = counted(2, "process"), counted(4, "micro-batch"), counted(2, "epoch")
    assert counts == ("2 processes", "4 micro-batches", "2 epochs")


@pytest.mark.parametrize(
    ("name", "nearest"), [("dpp", "ddp"), ("DDP", "ddp"), ("modle", "model"), ("mdoe", "mode"), ("zzz", None)]
)
def test_an_unknown_name_gets_its_nearest_and_all_valid_ones(name: str, nearest: str | None) -> None:
    meant = f"; did you mean '{nearest}'?" if nearest else ""
    assert unknown("x", name, ("mode", "model", "ddp")) == f"unknown x '{name}'{meant} (valid: mode, model, ddp)"
