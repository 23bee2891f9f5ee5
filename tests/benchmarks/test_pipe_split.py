"""The benchmark of split backwards measures three ways that make the same gradients, and sees one that does not."""

from types import SimpleNamespace

import pipe_split
import pytest
import torch

from muster.pipe.splitting.halves import WeightQueue

WIDTH, TOKENS = 32, 4


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, TOKENS, WIDTH, requires_grad=True), torch.randn(1, TOKENS, WIDTH)


@pytest.mark.parametrize("exact", [True, False])
def test_all_sides_make_the_same_gradients_and_are_timed(exact):
    sides = pipe_split.sides_of(WIDTH, "cpu", exact=exact)
    x, gradient = inputs()
    assert all(each < 1e-6 for each in pipe_split.check(sides, x, gradient).values())
    forwards: list[float] = []
    assert all(pipe_split.measure(side, x, gradient, 2, forwards) > 0 for side in sides.values())
    assert len(forwards) == len(sides)
    assert all(each > 0 for each in forwards)


def test_a_side_that_leaves_weights_out_is_refused(monkeypatch):
    monkeypatch.setattr(WeightQueue, "run", lambda self, key: self.discard())
    args = SimpleNamespace(device="cpu", samples=1, exact=False, repeats=1, passes=1)
    with pytest.raises(SystemExit, match="gradients differ"):
        pipe_split.row_of(WIDTH, args)
