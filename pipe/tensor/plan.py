"""Rules of a plan: ways to split each kind of module over ranks.

    plan = {
        "embed.token":         Vocabulary(),
        "embed":               SequenceStart(),
        "block*.norm*":        Sequence(),
        "block*.attention":    Heads("heads", columns=("query", "key", "value"), through="project"),
        "block*.mlp.up":       Column(),
        "block*.mlp.down":     Row(),
        "head":                Vocabulary(),
    }

The parts of a pattern between dots are matched one by one, so `*` does not cross a dot. Modules without a rule compute
the same values on every rank. Every rule is checked before any is applied, so nothing is sent if a model cannot be
split.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn

from muster.pipe.tensor.linear import ColumnLinear, JoinedColumns, RowLinear
from muster.pipe.tensor.region import Region
from muster.pipe.tensor.rng_streams import OwnStream
from muster.pipe.tensor.sequences import SumGradients, part_of_output
from muster.pipe.tensor.vocabulary import VocabularyEmbedding, VocabularyLinear

Cuts = Mapping[str, int | None]  # a module's own parameters and the dimension that is split; None: not split


class Rule:
    """One way to split a module."""

    sequence_only: ClassVar[bool] = False  # True: the rule has no effect unless sequences are split

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Yield the reasons why a module cannot be split, with the sizes that do not fit."""
        yield from ()

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Yield the names of the parameters to split, each with the dimension to split."""
        yield from ()

    def apply(self, module: nn.Module, region: Region) -> None:
        """Make a module compute with this rank's part, after its parameters have been cut."""


@dataclass(frozen=True)
class Column(Rule):
    """A linear layer whose outputs are split. Its input is whole on every rank, or this rank's part of a sequence."""

    becomes: ClassVar[type[ColumnLinear]] = ColumnLinear

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Require a linear layer with outputs divisible by the number of ranks."""
        yield from _of_type(module, nn.Linear)
        if isinstance(module, nn.Linear):
            yield from _divides(module.out_features, "outputs", ranks)

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Split the rows of the weight, and the bias."""
        yield "weight", 0
        if module.bias is not None:
            yield "bias", 0

    def apply(self, module: nn.Module, region: Region) -> None:
        """Turn the module into a layer with fewer outputs."""
        assert isinstance(module, nn.Linear)
        become(module, self.becomes, region=region, out_features=module.weight.shape[0])


@dataclass(frozen=True)
class Row(Rule):
    """A linear layer whose inputs, the outputs of a column layer, are split. Its output is summed over the ranks."""

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Require a linear layer with inputs divisible by the number of ranks."""
        yield from _of_type(module, nn.Linear)
        if isinstance(module, nn.Linear):
            yield from _divides(module.in_features, "inputs", ranks)

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Split the columns of the weight; the bias stays whole."""
        yield "weight", 1

    def apply(self, module: nn.Module, region: Region) -> None:
        """Turn the module into a layer with fewer inputs."""
        assert isinstance(module, nn.Linear)
        become(module, RowLinear, region=region, in_features=module.weight.shape[1])


@dataclass(frozen=True)
class Vocabulary(Rule):
    """An embedding or a head whose vocabulary is split. An embedding and a head may share one weight."""

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Require a plain embedding or linear layer whose vocabulary is divisible by the number of ranks."""
        yield from _of_type(module, nn.Embedding, nn.Linear)
        if isinstance(module, nn.Embedding):
            for extra in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, extra) is not None and getattr(module, extra) is not False:  # 0 is a padding_idx
                    yield f"{extra} is not supported with a split vocabulary"
            yield from _divides(module.num_embeddings, "tokens of its vocabulary", ranks)
        elif isinstance(module, nn.Linear):
            yield from _divides(module.out_features, "tokens of its vocabulary", ranks)

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Split the rows of the weight, and the bias."""
        yield from Column().cuts(module) if isinstance(module, nn.Linear) else iter([("weight", 0)])

    def apply(self, module: nn.Module, region: Region) -> None:
        """Turn the module into a layer with a smaller vocabulary."""
        if isinstance(module, nn.Embedding):
            whole, own = module.num_embeddings, module.weight.shape[0]
            become(module, VocabularyEmbedding, region=region, vocabulary=whole, num_embeddings=own)
        else:
            _VocabularyColumn().apply(module, region)


class _VocabularyColumn(Column):
    becomes = VocabularyLinear


@dataclass(frozen=True)
class Heads(Rule):
    """An attention whose heads are split. `count` names the attribute or attributes that hold the number of heads.

    If keys and values have fewer heads than queries, name both attributes; both numbers must be divisible by the number
    of ranks. `columns` names the linear layers whose outputs belong to the heads. `through` names the method that maps
    the input to the outputs of all these layers, in that order; it is replaced by one product and one exchange.
    `dropout` names the attribute with the dropout probability of attention, if there is one: each rank then draws its
    own masks.
    """

    count: str | tuple[str, ...] = "heads"
    columns: tuple[str, ...] = ()
    through: str | None = None
    dropout: str | None = None

    def problems(self, module: nn.Module, ranks: int) -> Iterator[str]:
        """Require numbers of heads divisible by the number of ranks, and valid column layers."""
        missing = [each for each in self._counts() if not hasattr(module, each)]
        parts = dict(module.named_modules())
        if missing := [*missing, *(each for each in self.columns if each not in parts)]:
            yield f"{type(module).__name__} has no {', '.join(missing)}; name attributes and submodules that it has"
            return
        for count in self._counts():
            yield from _divides(getattr(module, count), "heads" if self.count == count else f"heads ({count})", ranks)
        for name in self.columns:
            yield from (f"{name}: {each}" for each in Column().problems(parts[name], ranks))

    def cuts(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Split the parameters of the column layers."""
        for name in self.columns:
            yield from ((f"{name}.{own}", cut) for own, cut in Column().cuts(module.get_submodule(name)))

    def apply(self, module: nn.Module, region: Region) -> None:
        """Make the module compute with fewer heads."""
        for count in self._counts():
            setattr(module, count, getattr(module, count) // region.ranks)
        layers: list[Any] = [module.get_submodule(name) for name in self.columns]
        for layer in layers:
            Column().apply(layer, region)
        if self.through is not None:
            setattr(module, self.through, JoinedColumns(layers))
        if self.dropout is not None and getattr(module, self.dropout) > 0.0 and region.ranks > 1:
            OwnStream(module, region)

    def _counts(self) -> tuple[str, ...]:
        return (self.count,) if isinstance(self.count, str) else self.count


@dataclass(frozen=True)
class Sequence(Rule):
    """A module between split layers, which works on this rank's part of a sequence and has its own random stream."""

    sequence_only: ClassVar[bool] = True

    def apply(self, module: nn.Module, region: Region) -> None:
        """Sum the gradients of its parameters over the ranks; the parameters are whole on every rank."""
        if next(module.parameters(), None) is not None:
            SumGradients(module, region)
        if getattr(module, "p", 0.0) > 0.0:
            OwnStream(module, region)


@dataclass(frozen=True)
class SequenceStart(Rule):
    """The last module that works on the whole sequence. Each rank keeps only its part of the output."""

    sequence_only: ClassVar[bool] = True

    def apply(self, module: nn.Module, region: Region) -> None:
        """Keep this rank's part of the output."""
        part_of_output(module, region)


def become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Change the class of a module in place, so that references to the module, its name and its hooks stay valid."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a module's name, part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _of_type(module: nn.Module, *types: type[nn.Module]) -> Iterator[str]:
    if type(module) not in types:
        yield f"is a {type(module).__name__}, expected {' or '.join(each.__name__ for each in types)}"


def _divides(size: int, what: str, ranks: int) -> Iterator[str]:
    if size % ranks:
        next_up = -(-size // ranks) * ranks
        yield f"{size} {what} cannot be split evenly over {ranks} ranks; use a multiple of {ranks}, such as {next_up}"
