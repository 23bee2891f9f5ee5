"""What a machine calls its processor."""

import os
from pathlib import Path

import pytest

from muster.jobs.machine import hardware as machine


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC 7B13\n\nprocessor : 1\nmodel name\t: AMD EPYC 7B13\n", "AMD EPYC 7B13"),
        ("processor : 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("processor : 0\nBogoMIPS : 50.00\n", os.uname().machine),
    ],
)
def test_processors_are_named_as_their_kernel_does(tmp_path: Path, monkeypatch, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    assert machine.cpu_name() == name
