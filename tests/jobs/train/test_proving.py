"""`muster verify --with`: faulty classes fail by the property that names the fault, right ones by none."""

import sys
from pathlib import Path

import pytest

from support.proving import UNTIED, failing, prove

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def check(on_ranks, classes: list[str], **train) -> None:
    from with_faults import FAULTY

    asked = [{"text": text, "folder": str(ROOT), "silent_s": 5.0 if "Waits" in text else 20.0} for text in classes]
    for text, record in prove(on_ranks, asked, **train).items():
        expected, found = FAULTY.get(text, ()), failing(record)
        assert set(expected[:1]) <= set(found) <= set(expected), (text, record)


@pytest.mark.parametrize("kind", ["wrappers", "others"])
def test_every_fault_is_found_by_the_property_that_names_it(on_ranks, kind):
    from with_faults import FAULTY

    check(on_ranks, [text for text in FAULTY if kind in text], **({} if kind == "wrappers" else UNTIED))


def test_right_classes_fail_no_property(on_ranks):
    from with_faults import RIGHT

    check(on_ranks, RIGHT, **UNTIED)
