"""A split backward computes the same gradients: bit for bit where promised, close elsewhere."""

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from muster.jobs.models.shapes import GptShape, VggShape
from muster.jobs.train.models.gpt import TransformerBlock, build_gpt
from muster.jobs.train.models.vgg import build_vgg
from muster.pipe.splitting.halves import WeightQueue

Gradients = dict[str, Tensor | None]


def loop(module: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """Run forward and backward of every micro-batch; return outputs and gradients of inputs."""
    seen = []
    for x in batches:
        y = module(x)
        y.square().sum().backward()
        seen += [y.detach(), *([x.grad] if x.grad is not None else [])]
    return seen


def split_loop(module: nn.Module, batches: Sequence[Tensor], *, exact: bool = True) -> list[Tensor]:
    """Do the same split: all forwards, then all gradients of inputs, then all of weights."""
    seen = []
    with WeightQueue(module, exact=exact) as queue:
        outputs = [module(x) for x in batches]
        for index, (x, y) in enumerate(zip(batches, outputs, strict=True)):
            with queue.collecting(index):
                y.square().sum().backward()
            seen += [y.detach(), *([x.grad] if x.grad is not None else [])]
        for index in range(len(batches)):
            queue.run(index)
        queue.finish()
    return seen


def gradients_of(module: nn.Module) -> Gradients:
    return {name: each.grad for name, each in module.named_parameters()}


def differing(ours: nn.Module, plain: nn.Module) -> list[str]:
    """Name the parameters whose gradients differ in bits or strides."""
    mine, wanted = gradients_of(ours), gradients_of(plain)
    return [name for name, each in wanted.items() if not _same(mine[name], each)]


def _same(mine: Tensor | None, wanted: Tensor | None) -> bool:
    if mine is None or wanted is None:
        return mine is wanted
    return torch.equal(mine, wanted) and mine.stride() == wanted.stride() and mine.dtype == wanted.dtype


def far(ours: nn.Module, plain: nn.Module, most: float = 1e-5) -> list[str]:
    """Name the parameters whose gradients differ by more than `most`, relative to the model's largest gradient."""
    mine, wanted = gradients_of(ours), gradients_of(plain)
    largest = max(each.abs().max() for each in wanted.values() if each is not None)
    return [
        name
        for name, each in wanted.items()
        if each is not None and (mine[name] is None or (mine[name] - each).abs().max() > most * largest)
    ]


def batches_of(*shape: int, count: int = 3, learns: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape, dtype=dtype, requires_grad=learns) for _ in range(count)]


def again(batches: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().requires_grad_(each.requires_grad) for each in batches]


def compared(
    module: nn.Module, batches: Sequence[Tensor], apart: Callable[..., list[str]] = differing, *, exact: bool = True
) -> list[str]:
    """Run both ways; name what differs, with "outputs" for outputs and gradients of inputs."""
    plain = copy.deepcopy(module)
    wanted = loop(plain, again(batches))
    seen = split_loop(module, again(batches), exact=exact)
    same = len(seen) == len(wanted) and all(map(torch.equal, seen, wanted))
    return apart(module, plain) + ([] if same else ["outputs"])


def blocks(width: int, *, bias: bool = True, count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    shape = GptShape("test", width, 4 * width, count, width // 32, bias=bias, norm="layer")
    return nn.Sequential(*(TransformerBlock(shape) for _ in range(count)))


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("exact", [True, False])
def test_blocks_of_a_gpt_have_the_bits_of_a_loop_where_promised_and_are_close_else(width, exact):
    module = blocks(width)
    assert len(list(module.parameters())) == 48
    assert compared(module, batches_of(1, 32, width), differing if exact else far, exact=exact) == []


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "no biases": (lambda: blocks(32, bias=False, count=1), lambda: batches_of(2, 8, 32)),
    "rows": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), lambda: batches_of(4, 8)),
    "a vector": (lambda: nn.Linear(8, 6), lambda: batches_of(8)),
    "four axes": (lambda: nn.Linear(8, 6), lambda: batches_of(2, 3, 4, 8)),
    "one row": (lambda: nn.Linear(8, 6), lambda: batches_of(1, 8)),
    "in place behind rows": (lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True)), lambda: batches_of(4, 8)),
    "in place behind a view": (
        lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 6, bias=False), nn.ReLU(True)),
        lambda: batches_of(2, 4, 8),
    ),
    "no gradient of the input": (
        lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
        lambda: batches_of(2, 4, 8, learns=False),
    ),
    "turned inputs": (lambda: Turned(bias=True), lambda: batches_of(2, 8, 5)),
    "turned inputs, no bias": (lambda: Turned(bias=False), lambda: batches_of(2, 8, 5)),
    "turned inputs that do not learn": (lambda: Turned(bias=True), lambda: batches_of(2, 8, 5, learns=False)),
    "an output that is broadcast": (lambda: nn.Sequential(nn.Linear(8, 1), Widened()), lambda: batches_of(4, 8)),
    "a branch that goes nowhere": (lambda: Ends(), lambda: batches_of(4, 8)),
    "used twice": (lambda: Twice(nn.Linear(8, 8)), lambda: batches_of(2, 4, 8)),
    "one weight, two layers": (lambda: shared(), lambda: batches_of(4, 8)),
    "a tied head": (lambda: TiedHead(), lambda: [each.abs().mul(4).long() % 6 for each in batches_of(2, 5)]),
    "a computed weight": (lambda: parametrizations.weight_norm(nn.Linear(8, 6)), lambda: batches_of(4, 8)),
    "a forward of its own": (lambda: Scaled(8, 6), lambda: batches_of(4, 8)),
    "attention of torch's": (lambda: SelfAttention(), lambda: batches_of(2, 5, 8)),
    "float64": (lambda: nn.Linear(8, 6).double(), lambda: batches_of(4, 8, dtype=torch.float64)),
    "bfloat16": (lambda: nn.Linear(8, 6).bfloat16(), lambda: batches_of(4, 8, dtype=torch.bfloat16)),
    "images": (lambda: convolutions(), lambda: batches_of(2, 3, 8, 8, learns=False)),
    "images last": (lambda: convolutions().to(memory_format=torch.channels_last), lambda: batches_of(2, 3, 8, 8)),
    "one image": (lambda: nn.Conv2d(3, 4, 3), lambda: batches_of(3, 8, 8)),
    "an even kernel, padded to the same": (lambda: nn.Conv2d(3, 4, 2, padding="same"), lambda: batches_of(2, 3, 6, 6)),
    "other convolutions": (lambda: OtherConvolutions(), lambda: batches_of(2, 4, 6)),
}


class Turned(nn.Module):
    """A linear layer whose input is not row-major."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).tanh()


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 5)


class Ends(nn.Module):
    """The output of one layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.layer(x).tanh()))


def shared() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module[2].weight = module[0].weight
    return module


class TiedHead(nn.Module):
    """An embedding that shares its weight with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)).tanh())


class Scaled(nn.Linear):
    """A layer with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight * 2, self.bias)


class SelfAttention(nn.Module):
    """Uses the weights of linear layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding="same", bias=False, groups=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, (3, 1), stride=2, padding=(1, 0), dilation=(2, 1)),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


class OtherConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.volume, self.back = nn.Conv1d(4, 4, 3), nn.Conv3d(4, 2, 2), nn.ConvTranspose1d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        line = self.line(x)  # (2, 4, 4)
        return self.volume(line.view(2, 4, 2, 2, 1).expand(-1, -1, -1, -1, 2)).sum() + self.back(line)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", MODULES)
def test_exact_gradients_have_the_bits_of_a_loop(name):
    build, batches = MODULES[name]
    torch.manual_seed(0)
    assert compared(build(), batches()) == []


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [name for name in MODULES if name != "bfloat16"])
def test_other_gradients_are_close_to_a_loops(name):
    build, batches = MODULES[name]
    torch.manual_seed(0)
    assert compared(build(), batches(), far, exact=False) == []


def test_a_vgg_and_a_gpt_have_the_bits_of_a_loop():
    vgg = build_vgg(VggShape("test", (8, 0, 16, 0, 16, 0, 16, 0, 16, 0)), 1)
    gpt = build_gpt(GptShape("test", 32, 64, 2, 2, context=16, vocabulary=17, dropout=0.0), 1)
    tokens = [torch.arange(32).view(2, 16).add(index) % 17 for index in range(3)]
    assert compared(vgg, batches_of(3, 3, 32, 32, learns=False)) == []
    assert compared(gpt, tokens) == []


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_what_is_frozen_gets_no_gradient(frozen):
    module = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(4, 4, 1), nn.Linear(8, 2))
    for layer in module:
        layer.weight.requires_grad_(frozen == "bias")
        layer.bias.requires_grad_(frozen == "weight")
    assert compared(module, batches_of(2, 4, 8)) == []


@pytest.mark.parametrize("name", ["no biases", "turned inputs", "images", "rows"])
def test_autocast_computes_and_adds_as_a_plain_backward_does(name):
    build, batches = MODULES[name]
    torch.manual_seed(0)
    plain, seen, wanted = build(), [], []
    ours = copy.deepcopy(plain)
    kept: list[torch.dtype] = []
    for x in again(batches()):
        with torch.autocast("cpu", torch.bfloat16):
            y = plain(x)
        y.float().square().sum().backward()
        wanted.append(y.detach())
    with WeightQueue(ours, exact=True) as queue:
        for index, x in enumerate(again(batches())):
            with torch.autocast("cpu", torch.bfloat16):
                y = ours(x)
            with queue.collecting(index):
                y.float().square().sum().backward()
            kept += [work.x.dtype for work in queue._works[index]]
            queue.run(index)
            seen.append(y.detach())
    assert all(map(torch.equal, seen, wanted))
    assert differing(ours, plain) == []
    assert set(kept) == {torch.bfloat16}  # half the memory of the inputs


class Again(nn.Module):
    """Runs its layers' forwards again in the backward."""

    def __init__(self, *layers: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(*layers), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_forwarded_again_keeps_its_input_only(reentrant):
    layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 4)]
    module = Again(*layers, reentrant=reentrant)
    assert compared(module, batches_of(4, 8)) == []
    with WeightQueue(module):
        y = module(torch.randn(4, 8, requires_grad=True))
        gc.collect()  # reference cycles of other tests
        held = [each for each in gc.get_objects() if type(each) is Tensor and each.shape == (4, 64)]
    assert held == []
    del y


def test_offloaded_inputs_come_back():
    module = blocks(32, count=1)
    plain = copy.deepcopy(module)
    packed: list[int] = []

    def pack(x: Tensor) -> list[Tensor]:
        packed.append(x.numel())
        return [x]

    for each, queue in ((plain, None), (module, WeightQueue(module, exact=True))):
        for index, x in enumerate(batches_of(1, 8, 32)):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda cell: cell[0]):
                y = each(x)
            with nullcontext() if queue is None else queue.collecting(index):
                y.square().sum().backward()
            if queue is not None:
                queue.run(index)
    assert differing(module, plain) == []
