"""`muster verify --with`: faulty classes fail by the property that names the fault, right ones by none."""

from pathlib import Path

import pytest
from with_faults import FAULTY, RIGHT

from support.proving import UNTIED, failing, prove

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def check(on_ranks, classes: list[str], **train) -> dict:
    """Prove classes, and compare what fails with what should; return the records by the names of the classes."""
    asked = [
        # Of a faulty class, the first probe, and that of the property that names the fault; the benchmark runs all.
        {
            "text": text,
            "folder": str(ROOT),
            "silent_s": 5.0 if "Waits" in text else 20.0,
            "probes": FAULTY.get(text, ())[:1],
        }
        for text in classes
    ]
    records = prove(on_ranks, asked, **train)
    for text, record in records.items():
        expected, found = FAULTY.get(text, ()), failing(record)
        assert set(expected[:1]) <= set(found) <= set(expected), (text, record)
    return {text.rpartition(":")[2]: record for text, record in records.items()}


def test_a_faulty_wrapper_fails_by_the_property_that_names_the_fault(on_ranks):
    records = check(on_ranks, [text for text in FAULTY if "wrappers" in text])
    failure = records["Raises"]["tracebacks"][0]
    assert (failure["rank"], failure["step"], failure["error"]) == (1, "step 1", "IndexError: bucket 7 of 6")
    assert "wrappers.py" in failure["traceback"].splitlines()[1]
    (hang,) = [row for row in records["WaitsForever"]["rows"] if row["name"] == "no-hang"]
    assert "rank 0, step 0: waits in allreduce at benchmarks/faulty/wrappers.py:" in hang["evidence"]


def test_a_faulty_optimizer_module_or_pipeline_does_too(on_ranks):
    check(on_ranks, [text for text in FAULTY if "others" in text], **UNTIED)


def test_right_classes_fail_no_property(on_ranks):
    check(on_ranks, RIGHT, **UNTIED)


BAD = """
from torch import nn

class Depth(nn.Module):
    def __init__(self, module, depth):
        super().__init__()

class Broken(nn.Module):
    def __init__(self, module):
        raise KeyError("nothing here")

class Silent:
    def __init__(self, layers, microbatches):
        pass

    def train_step(self, inputs, targets, loss):
        pass

value = 7
"""


def test_a_class_that_cannot_be_built_is_one_message_with_the_rank(on_ranks, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "waits.py").write_text("import signal\n\nwhile True:\n    signal.pause()\n")
    wanted = {
        "bad.py:Depth": "takes (module, depth), but verify calls it as Class(module)",
        "bad.py:Broken": "raised KeyError: 'nothing here'",
        "bad.py:Silent": "but has no parameters; add it",
        "bad.py:value": "is of type int; name a class",
        "bad.py:Dept": "did you mean 'Depth'",
        "gone.py:Depth": "no such file",
        "ends.py:DDP": "unknown: its process ended with code 3",
        "waits.py:DDP": "import: is stuck at waits.py:",
    }
    silent = {"waits.py:DDP": 2.0}
    asked = [{"text": text, "folder": str(tmp_path), "silent_s": silent.get(text, 20.0)} for text in wanted]
    records = prove(on_ranks, asked)
    for text, said in wanted.items():
        assert said in records[text]["error"], records[text]
        assert ": rank " in records[text]["error"]


def test_a_right_class_on_a_loaded_machine_does_not_hang(on_ranks):
    # rank 1 computes for 0.6 s on a core that it shares with 6 processes, while rank 0 waits for it
    asked = {"text": "starved.py:Starved", "folder": str(ROOT / "tests/support/made"), "silent_s": 3.0}
    record = prove(on_ranks, [{**asked, "probes": ("unused",)}])["starved.py:Starved"]
    assert not {"no-hang", "runs", "mean", "unused"} & set(failing(record)), record
