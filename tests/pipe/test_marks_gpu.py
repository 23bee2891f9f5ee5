"""Marks show when a GPU reached a point, not when it was launched. `pytest -m gpu`, one GPU."""

import time

import pytest
import torch

from muster.pipe.marks import marks_for

pytestmark = pytest.mark.gpu

LONG_CYCLES = 3_000_000_000  # takes a second or two
APART_S = 0.01  # largest delay on the host between an event and noticing it


def test_marks_are_made_at_once_and_lie_where_the_gpu_got_there():
    marks = marks_for(torch.device("cuda", 0))
    torch.cuda.synchronize()
    began_s = time.monotonic()
    first = marks.now()
    torch.cuda._sleep(LONG_CYCLES)
    second = marks.now()
    told_s = time.monotonic()
    torch.ones(1, device="cuda").item()  # waits for the GPU
    there_s = time.monotonic()
    start_s, end_s = marks.seconds([first, second])
    assert began_s - APART_S <= start_s <= told_s + APART_S
    assert told_s < end_s <= there_s + APART_S
    assert marks.seconds([first, second]) == pytest.approx([start_s, end_s], abs=APART_S)
