"""Changes to a model after its pipeline is built: each works as without a pipeline, or is refused with one message."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.world.world import World
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.tables import schedule
from support.data_parallel import same_bits
from support.refusals import told_by

pytestmark = pytest.mark.ranks

TOKENS, WIDTH, PARTS = 7, 4, 4
PROMPT_S = 20.0  # less than the 30 s timeout of the groups, so that no rank ends by a timeout


def model(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Embedding(TOKENS, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, TOKENS, bias=False),
    )
    if tied:
        layers[4].weight = layers[0].weight
    return layers


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(TOKENS, (9,), generator=generator), torch.randint(TOKENS, (9,), generator=generator)


def loop(layers: nn.Module, step: int = 0) -> None:
    inputs, targets = batch(step)
    for x, y in zip(inputs.tensor_split(PARTS), targets.tensor_split(PARTS), strict=True):
        (functional.cross_entropy(layers(x), y) * (len(x) / len(inputs))).backward()


def piped(layers: nn.Sequential, name: str = "1f1b", ranks: int = 1, **settings: Any) -> Pipeline:
    return Pipeline(layers, schedule(name, ranks, PARTS), loss=functional.cross_entropy, **settings)


def apart(part: nn.Module, whole: nn.Module) -> list[str]:
    """Name the parameters that differ from the whole model's, or have other gradients."""
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    return [name for name, each in part.named_parameters() if not _alike(each, wanted[name])]


def _alike(one: nn.Parameter, other: nn.Parameter) -> bool:
    if one.grad is None or other.grad is None:
        return one.grad is other.grad and same_bits(one, other)
    return same_bits(one, other) and same_bits(one.grad, other.grad)


def doubled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each * 2.0 for name, each in state.items()}


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "another type": lambda module: module.double(),
    "frozen": lambda module: module.get_submodule("1").requires_grad_(False),
    "loaded": lambda module: module.load_state_dict(doubled(module.state_dict())),
    "assigned": lambda module: module.load_state_dict(doubled(module.state_dict()), assign=True),
    "another weight": lambda module: setattr(
        module.get_submodule("1"), "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))
    ),
    "initialized": lambda module: module.apply(lambda each: [nn.init.constant_(p, 0.1) for p in each.parameters()]),
}


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(("name", "way"), [("1f1b", {}), ("1f1b", {"recompute": True}), ("zb1p", {"recompute": True})])
def test_a_model_may_be_changed_between_steps(name, way, steps_before):
    for change, do in CHANGES.items():
        layers, plain = model(), model()
        pipeline = piped(layers, name, exact=True, **way)
        for step in range(steps_before + 1):
            if step == steps_before:
                layers.zero_grad()
                plain.zero_grad()
                do(pipeline.module)
                do(plain)
            pipeline.step(*batch(step))
            loop(plain, step)
        assert apart(pipeline.module, plain) == [], change


@pytest.mark.filterwarnings("ignore")  # warnings from torch's compiler about torch itself
@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
def test_layers_may_be_compiled_where_they_are(name):
    torch._dynamo.reset()
    layers, plain = model(), model()
    pipeline = piped(layers, name, exact=True)
    pipeline.module.compile(backend="aot_eager")
    assert all(each._compiled_call_impl is not None for each in layers)
    pipeline.step(*batch())
    loop(plain)
    assert apart(pipeline.module, plain) == []


def test_a_copy_of_split_stages_is_a_plain_model_with_their_weights():
    pipeline = piped(model(), "zbv", cuts=(0, 2))
    pipeline.step(*batch())
    averaged = copy.deepcopy(pipeline.module)
    x = batch()[0]
    for layer in averaged.children():
        x = layer(x)
    x.sum().backward()
    assert [*averaged.state_dict()] == [*pipeline.module.state_dict()]
    assert all(each.grad is not None for each in averaged.parameters())
    pipeline.step(*batch())
    # Evaluate the same micro-batches: a product over all rows at once may round differently.
    plain = nn.Sequential(*averaged.children())
    assert torch.equal(pipeline.evaluate(batch()[0]), torch.cat([plain(x) for x in batch()[0].tensor_split(PARTS)]))


def test_what_stages_would_not_notice_is_refused():
    pipeline = piped(model())
    with pytest.raises(AttributeError, match="layer '1' of a pipeline cannot be replaced; replace it before"):
        pipeline.module.add_module("1", nn.Identity())
    pipeline.module.to("meta")
    with pytest.raises(ValueError, match="layers are on meta, but the pipeline was built for cpu; move them before"):
        pipeline.step(*batch())


class Learned(nn.Module):
    """A loss with its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(x * self.scale, y)


def test_a_loss_that_learns_gets_its_gradients():
    loss, plain = Learned(), Learned()
    Pipeline(model(), schedule("1f1b", 1, 1), loss=loss).step(*batch())
    plain(model()(batch()[0]), batch()[1]).backward()
    assert torch.equal(loss.scale.grad, plain.scale.grad)


def optimized_before(world: World) -> list[str]:
    """Build an optimizer before the pipeline; freeze the tied weight in the first step only."""
    layers, plain = model(tied=True), model(tied=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (layers, plain)]
    for each in (layers, plain):
        each[0].requires_grad_(False)
    pipeline = piped(layers, ranks=world.size, exact=True)
    problems = []
    for step in range(3):
        for each in (layers, plain):
            each.zero_grad()
            each[0].requires_grad_(step > 0)
        pipeline.step(*batch(step))
        loop(plain, step)
        for optimizer in optimizers:
            optimizer.step()
        problems += [f"step {step}: {name}" for name in apart(pipeline.module, plain)]
    pipeline = piped(layers, ranks=world.size)
    weight = layers[4 * world.rank].weight
    pipeline.step(*batch())
    kept = None if weight.grad is None else weight.grad.clone()
    weight.requires_grad_(False)
    pipeline.step(*batch())
    return problems if kept is not None and same_bits(weight.grad, kept) else [*problems, "a frozen gradient changed"]


def test_an_optimizer_may_be_built_before_and_tied_weights_learn_later(on_ranks):
    assert on_ranks(2, optimized_before) == [[]] * 2


def refused(world: World) -> list[str]:
    """Return the errors for changes that only some ranks can detect."""

    def said_by(change: Callable[[Pipeline], object], inputs: Tensor | None = None, *, tied: bool = True) -> str:
        pipeline = piped(model(tied=tied), ranks=world.size)
        pipeline.step(*batch())
        change(pipeline)
        return told_by(lambda: pipeline.step(batch()[0] if inputs is None else inputs, batch()[1]))

    def freeze(pipeline: Pipeline) -> None:
        if world.rank == 1:
            pipeline.module.get_submodule("4").requires_grad_(False)

    def assign(pipeline: Pipeline) -> None:
        pipeline.module.load_state_dict(doubled(pipeline.module.state_dict()), assign=True)

    return [
        said_by(freeze),
        said_by(assign),
        said_by(lambda pipeline: pipeline.module.double(), tied=False),
        said_by(lambda pipeline: None, batch()[0][:3]),
    ]


def test_changes_that_ranks_must_make_together_are_refused_with_one_message(on_ranks):
    wanted = [
        "' is trainable in stages [0] but frozen in stages [1]; freeze it on all ranks that share it, or on",
        "' of several stages was replaced after the pipeline was built, as by load_state_dict(assign=True)",
        "(3, 4) of torch.float64, but earlier ones for the same number of samples were (3, 4) of torch.float32; ",
        "rank 0 failed: ValueError: 3 inputs but 9 targets",  # without a stage: none has run yet
    ]
    for rank, said in enumerate(on_ranks(2, refused, deadline_s=PROMPT_S)):
        for found, part in zip(said, wanted, strict=True):
            own = part.rpartition("failed: ")[2]
            assert own in found, (rank, found)
            assert part in found or not found.startswith("StageFailedError"), (rank, found)
