"""What is advised after an end: for every exit code that there is."""

import pytest

from muster.launch.records.advice import next_step


@pytest.mark.parametrize("own", [True, False])
def test_every_exit_code_has_an_advice(own: bool) -> None:
    """Also 163, as of a program that a real-time signal without a name has ended."""
    for code in range(256):
        failure = {"rank": 0, "node": 0, "host": "n0", "code": code, "signal": None, "message": "", "ours": own}
        assert next_step("failed", {**failure, "last_lines": []}, "").isprintable()
