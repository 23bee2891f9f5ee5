"""A pipeline over slices of sequences has the gradients of one process that reads whole sequences."""

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.stack import mean_loss
from muster.jobs.world.world import World
from muster.pipe import Pipeline
from muster.pipe.schedules.tables import schedule
from muster.pipe.token_slices import equal_slices, first_token, with_earlier_tokens

TOKENS = 24
CASES = {
    1: [(1, (24,)), (2, (8, 8, 8))],
    2: [(1, (12, 12)), (3, (1, 20, 3))],
    3: [(2, (9, 8, 4, 3)), (1, (6, 6, 6, 6))],
}


def gpt(**more: object) -> nn.Sequential:
    shape = GptShape("gpt", layers=3, d_model=16, heads=2, d_ff=32, vocabulary=50, context=TOKENS, **more)
    return build_gpt(shape, seed=3).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(50, (5, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def largest_differences(world: World, tied: bool) -> list[float]:
    """Train two steps by each case; return the largest relative difference to whole sequences on one process."""
    found = []
    for microbatches, tokens in CASES[world.size]:
        model, reference = gpt(tied=tied), gpt(tied=tied)
        table = schedule("terapipe", world.size, microbatches, slices=len(tokens))
        slices = tokens if len(tokens) > 1 else ()
        pipeline = Pipeline(model, table, loss=mean_loss, process_group=world.group, tokens=slices)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (pipeline.module, reference)]
        for step in range(2):
            inputs, targets = batch(step)
            loss, whole = pipeline.step(inputs, targets), mean_loss(reference(inputs), targets)
            whole.backward()
            found.append(abs(loss.item() - whole.item()) / whole.item())
            of_reference = dict(reference.named_parameters())
            for name, parameter in pipeline.module.named_parameters():
                wanted = of_reference.get(name, of_reference["embed.token.weight"]).grad
                assert parameter.grad is not None
                assert wanted is not None
                found.append(((parameter.grad - wanted).abs().max() / wanted.abs().max()).item())
            for each in optimizers:
                each.step()
                each.zero_grad()
        outputs = pipeline.evaluate(batch(7)[0])
        with torch.no_grad():
            found.append((outputs - reference(batch(7)[0])).abs().max().item())
    return found


@pytest.mark.parametrize(("length", "slices"), [(24, (6, 6, 6, 6)), (27, (7, 7, 7, 6)), (3, (1, 1, 1)), (1, (1,))])
def test_slices_are_equal_up_to_one_token(length: int, slices: tuple[int, ...]) -> None:
    assert equal_slices(length) == slices


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", CASES)
def test_slices_train_as_whole_sequences_in_one_process(on_ranks, ranks, tied):
    for found in on_ranks(ranks, largest_differences, tied=tied):
        assert max(found) < 1e-12


def pipeline_of(slices: int, tokens: tuple[int, ...], **more: bool) -> Pipeline:
    return Pipeline(gpt(), schedule("terapipe", 1, 2, slices=slices), loss=mean_loss, tokens=tokens, **more)


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens: 2 lengths for the 3 slices of schedule terapipe"):
        pipeline_of(3, (8, 16))
    with pytest.raises(ValueError, match="every slice needs at least one token, got 24, 0"):
        pipeline_of(2, (24, 0))
    with pytest.raises(ValueError, match="cannot be combined with recompute, exact or cuda_graphs"):
        pipeline_of(2, (12, 12), recompute=True)
    with pytest.raises(
        ValueError, match=r"inputs have shape \(5, 24\), but the slices 8, 8 need \(samples, 16, \.\.\.\)"
    ):
        pipeline_of(2, (8, 8)).step(*batch(0))


class Uneven(nn.Module):
    """Calls `with_earlier_tokens` only for the second slice."""

    def forward(self, x: Tensor) -> Tensor:
        return with_earlier_tokens(x)[0][:, -x.shape[1] :] if first_token() else x


def test_slices_that_run_different_layers_are_refused() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Uneven(), nn.Linear(4, 4))
    pipeline = Pipeline(
        layers, schedule("terapipe", 1, 1, slices=2), loss=lambda output, _: output.mean(), tokens=(3, 3)
    )
    with pytest.raises(RuntimeError, match="a slice that begins at token 3 calls with_earlier_tokens 1 times"):
        pipeline.step(torch.ones(2, 6, 4), torch.ones(2, 6))


def test_outside_a_step_nothing_is_sliced() -> None:
    x = torch.ones(2, 3, 4)
    assert first_token() == 0
    assert with_earlier_tokens(x) == (x,)
