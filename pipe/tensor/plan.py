"""Rows of a plan: what a module becomes when its model is split over ranks.

    plan = {
        "embed.token":         Vocabulary(),
        "embed":               SequenceStart(),
        "block*.norm*":        Sequence(),
        "block*.attention":    Heads("heads", columns=("query", "key", "value"), through="project"),
        "block*.mlp.up":       Column(),
        "block*.mlp.down":     Row(),
        "head":                Vocabulary(),
    }

A pattern is matched part by part between dots; `*` stays within a part. A module of which no row speaks is the same on
every rank, and so is what it computes. Every row checks before any splits: nothing is sent by a model that cannot be.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn

from muster.pipe.tensor.draws import OwnDraws
from muster.pipe.tensor.linear import ColumnLinear, RowLinear, Together
from muster.pipe.tensor.region import Region
from muster.pipe.tensor.sequences import SumGradients, part_of_output
from muster.pipe.tensor.vocabulary import VocabularyEmbedding, VocabularyLinear

Cuts = Mapping[str, int | None]  # of a module's own parameters, which dimension is split; None: whole on every rank


class Rule:
    """One way to split a module."""

    sequence_only: ClassVar[bool] = False  # True: does nothing unless sequences are split

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Say what keeps a module from being split, with numbers."""
        yield from ()

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Name the parameters below a module that are split, each with the dimension."""
        yield from ()

    def apply(self, module: nn.Module, region: Region) -> None:
        """Let a module whose parameters have been cut compute with its part."""


@dataclass(frozen=True)
class Column(Rule):
    """Outputs of a linear layer are split; its input is whole on every rank, or this rank's part of a sequence."""

    becomes: ClassVar[type[ColumnLinear]] = ColumnLinear

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Want a linear layer whose outputs the ranks divide."""
        yield from _of_type(module, nn.Linear)
        if isinstance(module, nn.Linear):
            yield from _divides(module.out_features, "outputs", ranks)

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Rows of the weight, and the bias."""
        yield "weight", 0
        if module.bias is not None:
            yield "bias", 0

    def apply(self, module: nn.Module, region: Region) -> None:
        """Make it a layer with fewer outputs."""
        assert isinstance(module, nn.Linear)
        become(module, self.becomes, region=region, out_features=module.weight.shape[0])


@dataclass(frozen=True)
class Row(Rule):
    """Inputs of a linear layer are split, as a column layer's outputs are; its output is summed."""

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Want a linear layer whose inputs the ranks divide."""
        yield from _of_type(module, nn.Linear)
        if isinstance(module, nn.Linear):
            yield from _divides(module.in_features, "inputs", ranks)

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Columns of the weight; the bias is whole."""
        yield "weight", 1

    def apply(self, module: nn.Module, region: Region) -> None:
        """Make it a layer with fewer inputs."""
        assert isinstance(module, nn.Linear)
        become(module, RowLinear, region=region, in_features=module.weight.shape[1])


@dataclass(frozen=True)
class Vocabulary(Rule):
    """Tokens of an embedding, or classes of a head, are split; one weight may be both's."""

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Want an embedding without extras, or a linear layer, whose vocabulary the ranks divide."""
        yield from _of_type(module, nn.Embedding, nn.Linear)
        if isinstance(module, nn.Embedding):
            for extra in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, extra) is not None and getattr(module, extra) is not False:  # padding_idx may be 0
                    yield f"{extra} is not supported where a vocabulary is split"
            yield from _divides(module.num_embeddings, "tokens of its vocabulary", ranks)
        elif isinstance(module, nn.Linear):
            yield from _divides(module.out_features, "tokens of its vocabulary", ranks)

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Rows of the weight, and the bias."""
        yield from Column().cuts(module) if isinstance(module, nn.Linear) else iter([("weight", 0)])

    def apply(self, module: nn.Module, region: Region) -> None:
        """Make it a layer with fewer tokens."""
        if isinstance(module, nn.Embedding):
            whole, own = module.num_embeddings, module.weight.shape[0]
            become(module, VocabularyEmbedding, region=region, vocabulary=whole, num_embeddings=own)
        else:
            _VocabularyColumn().apply(module, region)


class _VocabularyColumn(Column):
    becomes = VocabularyLinear


@dataclass(frozen=True)
class Heads(Rule):
    """An attention of which each rank has some heads: `count` names its number of them, or its numbers.

    Where keys and values have fewer heads than queries, both numbers are to be named, and the ranks divide both.
    `columns` names its linear layers whose outputs are the heads'. `through` names the method that maps its input to
    all of their outputs, in that order: with it they are one product and one exchange. `dropout` names the probability
    that attention drops with, where that is a number of the module's: a rank draws masks of its own.
    """

    count: str | tuple[str, ...] = "heads"
    columns: tuple[str, ...] = ()
    through: str | None = None
    dropout: str | None = None

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Want numbers of heads that the ranks divide, and column layers."""
        missing = [each for each in self._counts() if not hasattr(module, each)]
        parts = dict(module.named_modules())
        if missing := [*missing, *(each for each in self.columns if each not in parts)]:
            yield f"{type(module).__name__} has no {', '.join(missing)}; name what it has"
            return
        for count in self._counts():
            yield from _divides(getattr(module, count), "heads" if self.count == count else f"heads ({count})", ranks)
        for name in self.columns:
            yield from (f"{name}: {each}" for each in Column().problems(parts[name], ranks))

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Those of the column layers."""
        for name in self.columns:
            yield from ((f"{name}.{own}", cut) for own, cut in Column().cuts(module.get_submodule(name)))

    def apply(self, module: nn.Module, region: Region) -> None:
        """Let it compute with fewer heads."""
        for count in self._counts():
            setattr(module, count, getattr(module, count) // region.ranks)
        layers: list[Any] = [module.get_submodule(name) for name in self.columns]
        for layer in layers:
            Column().apply(layer, region)
        if self.through is not None:
            setattr(module, self.through, Together(layers))
        if self.dropout is not None and getattr(module, self.dropout) > 0.0 and region.ranks > 1:
            OwnDraws(module, region)

    def _counts(self) -> tuple[str, ...]:
        return (self.count,) if isinstance(self.count, str) else self.count


@dataclass(frozen=True)
class Sequence(Rule):
    """Between column and row layers: works on this rank's part of a sequence, and draws numbers of its own."""

    sequence_only: ClassVar[bool] = True

    def apply(self, module: nn.Module, region: Region) -> None:
        """Add up the ranks' gradients of its parameters, which are whole on every rank."""
        if next(module.parameters(), None) is not None:
            SumGradients(module, region)
        if getattr(module, "p", 0.0) > 0.0:
            OwnDraws(module, region)


@dataclass(frozen=True)
class SequenceStart(Rule):
    """The last module that works on all of a sequence: each rank keeps its part of what it makes."""

    sequence_only: ClassVar[bool] = True

    def apply(self, module: nn.Module, region: Region) -> None:
        """Take this rank's part of its output."""
        part_of_output(module, region)


def become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Change what a module does, in place: who holds it, its name and its hooks stay."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def matches(pattern: str, name: str) -> bool:
    """Match a module's name with a pattern, part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _of_type(module: nn.Module, *types: type[nn.Module]) -> Iterator[str]:
    if type(module) not in types:
        yield f"is a {type(module).__name__}, wanted {' or '.join(each.__name__ for each in types)}"


def _divides(size: int, what: str, ranks: int) -> Iterator[str]:
    if size % ranks:
        next_up = -(-size // ranks) * ranks
        yield f"{size} {what} cannot be split over {ranks} ranks: {size % ranks} would be left; {next_up} could be"
