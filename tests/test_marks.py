"""Which files `pytest -m` imports: those with a test that it may choose, by their text alone."""

from pathlib import Path

import pytest

from support.marks import chooses_any, marks_of

CORE = "not gpu and not cluster and not soak and (not slow)"
SLOW = "slow and not gpu and not cluster and not soak"
EACH = {
    "plain": "def test_it(): ...",
    "slow": "pytestmark = [pytest.mark.ranks,\n    pytest.mark.slow]\ndef test_it(): ...",
    "some slow": "@pytest.mark.slow\ndef test_it(): ...\ndef test_another(): ...",
    "gpu": "pytestmark = pytest.mark.gpu(2)\ndef test_it(): ...",
    "some soak": "pytestmark = pytest.mark.slow\n@pytest.mark.parametrize(*only_some([1], []))\ndef test_it(a): ...",
    "sshd": "def test_it(sshd): ...",
}


@pytest.mark.parametrize(
    ("expression", "files"),
    [
        (CORE, {"plain", "some slow", "sshd"}),
        (SLOW, {"slow", "some slow", "some soak"}),
        ("cluster and not soak", {"sshd"}),
        ("gpu", {"gpu"}),
        ("soak", {"some soak"}),
        ("unsteady", set()),
        ("ranks or gpu", set(EACH)),  # another mark may be anywhere
        ("slow and (", set(EACH)),  # pytest reports it
    ],
)
def test_files_are_left_out_if_no_test_can_be_chosen(tmp_path: Path, expression: str, files: set[str]) -> None:
    chosen = set()
    for name, text in EACH.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        if chooses_any(expression, *marks_of(path)):
            chosen.add(name)
    assert chosen == files
