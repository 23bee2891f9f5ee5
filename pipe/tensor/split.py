"""Split the layers of a model over ranks, in place, according to a plan."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.base import broadcast
from muster.ddp.checks import require_member
from muster.pipe.tensor.plan import Rule, matches
from muster.pipe.tensor.region import Region
from muster.pipe.tensor.slices import TensorSlice

Plan = Mapping[str, Rule]
Found = list[tuple[str, nn.Module, Rule]]


@dataclass(frozen=True)
class TensorParallel:
    """A split model: its region, and this rank's slice of every parameter, by global name."""

    module: nn.Module
    region: Region
    slices: dict[str, TensorSlice] = field(default_factory=dict)


def parallelize(
    module: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool = False,
    sequence_dimension: int = 1,
    partial: bool = False,
) -> TensorParallel:
    """Split a model in place. Tensors that are not split get rank 0's values.

    Every rank must pass the same whole model and plan, and later the same inputs. Gradients are those of one process,
    restricted to this rank's part. Parameters that are not split get gradients with the same bits on every rank, so
    they stay equal if every rank steps them alike. `group` None means one rank. This is a collective, unless parameters
    are on the meta device.

    With `sequence_parallel`, activations between split layers are split along `sequence_dimension` of (batch, tokens,
    ...), whose size must be divisible by the number of ranks. With dimension 0, each exchange needs one copy less, but
    the batch size must be divisible by the number of ranks. With `partial`, the module is one stage of a model, so rows
    of the plan may match no module.

    Raises:
        ValueError: If this rank is not in the group, a layer cannot be split as planned, a row of the plan matches no
        module, or two rows contradict each other. Nothing has been sent or changed in this case.
    """
    if group is not None:
        require_member(group)
    region = Region(group, sequence_dimension if sequence_parallel else None)
    found, problems = _find(module, plan, region.ranks, partial=partial)
    problems = problems or _cut_two_ways(module, list(_cuts(found)))
    if problems:
        raise ValueError("; ".join(problems))
    cuts = {id(module.get_parameter(name)): dimension for name, dimension in _cuts(found)}
    slices = {name: _slice_of(name, each, cuts.get(id(each)), region) for name, each in module.named_parameters()}
    if region.ranks > 1:
        whole = [each for each in module.parameters() if id(each) not in cuts]
        broadcast([each for each in (*whole, *module.buffers()) if not each.is_meta], region.group)
    _cut(module, found, slices, region)
    for _, part, rule in found:
        if region.splits_sequence or not rule.sequence_only:
            rule.apply(part, region)
    return TensorParallel(module, region, slices)


def _find(module: nn.Module, plan: Plan, ranks: int, *, partial: bool) -> tuple[Found, list[str]]:
    """List the modules that the plan matches, and all problems with splitting them."""
    found: Found = []
    problems: list[str] = []
    row_of: dict[int, str] = {}
    for pattern, rule in plan.items():
        if not isinstance(rule, Rule):
            problems.append(f"plan: {pattern!r} has a {type(rule).__name__}; expected a rule such as Column()")
            continue
        matched = [(name, part) for name, part in module.named_modules() if matches(pattern, name)]
        if not matched and not partial:
            names = ", ".join(name for name, _ in module.named_children())
            problems.append(f"plan: {pattern!r} matches no module; the model has {names}")
        for name, part in matched:
            if (other := row_of.setdefault(id(part), pattern)) != pattern:
                problems.append(f"{name}: rows {other!r} and {pattern!r} both match it; keep one row per module")
            found.append((name, part, rule))
            problems += [f"{name}: {each}" for each in rule.problems(part, ranks)]
    return found, problems


def _cuts(found: Found) -> Iterator[tuple[str, int]]:
    """Yield the parameters that the plan splits, each with the dimension that is split."""
    for name, part, rule in found:
        for own, dimension in rule.cuts(part):
            yield f"{name}.{own}".removeprefix("."), dimension


def _cut_two_ways(module: nn.Module, planned: Sequence[tuple[str, int]]) -> list[str]:
    """Describe parameters that would be split in two ways: by two rows of the plan, or under two names."""
    cuts: dict[str, int] = {}
    problems = []
    for name, dimension in planned:
        if cuts.setdefault(name, dimension) != dimension:
            problems.append(f"{name}: split along dimension {cuts[name]} by one row and {dimension} by another")
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if cuts.get(name) != cuts.get(other):
            ways = [
                "whole" if cuts.get(each) is None else f"split along dimension {cuts[each]}" for each in (other, name)
            ]
            problems.append(
                f"{other} ({ways[0]}) and {name} ({ways[1]}) are the same parameter; split both in the same way"
            )
    return problems


def _slice_of(name: str, parameter: Tensor, dimension: int | None, region: Region) -> TensorSlice:
    shape = tuple(parameter.shape)
    if dimension is None:
        return TensorSlice(name, shape, answers=region.rank == 0)
    return TensorSlice(name, shape, dimension, *region.share(shape[dimension]))


def _cut(module: nn.Module, found: Found, slices: Mapping[str, TensorSlice], region: Region) -> None:
    """Replace whole parameters by this rank's parts. If possible, the parts of one module are adjacent in memory."""
    name_of = {id(each): name for name, each in module.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for _, part, rule in found:
        whole = [(own, part.get_parameter(own)) for own, _ in rule.cuts(part)]
        for kind in dict.fromkeys(own.rpartition(".")[2] for own, _ in whole):
            alike = [each for own, each in whole if own.rpartition(".")[2] == kind and id(each) not in made]
            for each, local in zip(alike, _parts(alike, [slices[name_of[id(one)]] for one in alike]), strict=True):
                made[id(each)] = nn.Parameter(local, requires_grad=each.requires_grad)
    for part in module.modules():
        for own, parameter in part._parameters.items():
            if id(parameter) in made:
                part._parameters[own] = made[id(parameter)]


@torch.no_grad()
def _parts(whole: list[nn.Parameter], slices: list[TensorSlice]) -> list[Tensor]:
    """Copy parts of tensors into one flat tensor; return views of it."""
    if not whole:
        return []
    shapes = [each.local_shape for each in slices]
    flat = whole[0].new_empty(sum(map(math.prod, shapes)))
    views, at = [], 0
    for each, cut, shape in zip(whole, slices, shapes, strict=True):
        assert cut.dimension is not None
        view = flat[at : at + math.prod(shape)].view(shape)
        view.copy_(each.narrow(cut.dimension, cut.start, cut.stop - cut.start))
        views.append(view)
        at += view.numel()
    return views
