"""A sharded optimizer beside one that is not, on every rank: what must be the same, and what is not, in words."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.world.world import World
from muster.zero import ShardedOptimizer
from support.data_parallel import same_bits
from support.zero_models import OPTIMIZERS, Ragged, draw_gradients, row_major, seeded

Build = Callable[[], nn.Module]
Groups = Callable[[nn.Module], Any]


def one_group(module: nn.Module) -> Any:
    return module.parameters()


@dataclass
class Pair:
    """A module with a sharded optimizer, and its twin with one of torch's; of 16 bits the twin has the masters."""

    module: nn.Module
    optimizer: ShardedOptimizer
    twin: nn.Module
    reference: torch.optim.Optimizer

    def draw(self, step: int, without: Collection[str] = (), scale: float = 1.0) -> None:
        """Give both the same gradients."""
        draw_gradients(self.module, step, without, scale)
        self.follow()

    def follow(self, scale: float = 1.0) -> None:
        """Give the twin the gradients that the module has."""
        for mine, other in zip(self.module.parameters(), self.twin.parameters(), strict=True):
            other.grad = None if mine.grad is None else mine.grad.to(other.dtype, copy=True).contiguous() / scale

    def step(self) -> None:
        self.optimizer.step()
        self.reference.step()

    def apart(self) -> list[str]:
        """Name what differs in a bit: parameters, and the whole state; a collective."""
        problems = []
        twins = dict(self.twin.named_parameters())
        for name, parameter in self.module.named_parameters():
            if not same_bits(parameter, twins[name].to(parameter.dtype)):
                problems.append(f"{name} is off by {(parameter - twins[name]).detach().abs().max().item():.2e}")
        full, wanted = self.optimizer.full_state_dict(), self.reference.state_dict()
        masters = {number: entries.pop("master") for number, entries in full["state"].items() if "master" in entries}
        for number, parameter in enumerate(each for group in self.reference.param_groups for each in group["params"]):
            if number in masters and not same_bits(masters[number], parameter):
                problems.append(f"the master of {number} is another")
        problems += [f"state: {each}" for each in states_apart(full, wanted)]
        return problems

    def own_elements(self) -> int:
        """Count the elements of state that this rank holds."""
        kept = self.optimizer.inner.state.values()
        return sum(each.numel() for state in kept for each in state.values() if each.dim())


def pair(
    optimizer: str = "adamw",
    *,
    build: Build = Ragged,
    groups: Groups = one_group,
    dtype: torch.dtype | None = None,
    masters: bool = True,
    group: dist.ProcessGroup | None = None,
    seed: int = 1,
    **more: Any,
) -> Pair:
    kind, options = OPTIMIZERS[optimizer]
    module, twin = seeded(build, seed, dtype), row_major(seeded(build, seed, dtype))
    for each in twin.parameters():
        if masters and each.itemsize == 2:
            each.data = each.data.float()
    sharded = ShardedOptimizer(groups(module), kind, group, masters=masters, **options, **more)
    return Pair(module, sharded, twin, kind(groups(twin), **options, **more))


def states_apart(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Name what differs in two state dicts of optimizers."""
    problems = []
    if found["param_groups"] != wanted["param_groups"]:
        problems.append(f"groups {found['param_groups']} where {wanted['param_groups']} were wanted")
    if list(found["state"]) != sorted(wanted["state"]):
        return [*problems, f"of parameters {list(found['state'])} where {sorted(wanted['state'])} were wanted"]
    for number, entries in wanted["state"].items():
        kept = {key: value for key, value in entries.items() if value is not None}
        if found["state"][number].keys() != kept.keys():
            problems.append(f"of {number} {sorted(found['state'][number])} where {sorted(kept)} were wanted")
            continue
        problems += [
            f"{key} of {number} has other bits"
            for key, value in kept.items()
            if not same_bits(found["state"][number][key], value)
        ]
    return problems


def photograph(made: Pair) -> list[Tensor]:
    """Copy all that a step or a load may change on this rank: parameters, state, settings."""
    kept = [each for state in made.optimizer.inner.state.values() for each in state.values()]
    masters = [segment.stepped for group in made.optimizer.segments for segment in group]
    settings = [torch.tensor(float(group["lr"])) for group in made.optimizer.param_groups]
    return [each.detach().clone() for each in (*made.module.parameters(), *kept, *masters, *settings)]


def unchanged(made: Pair, before: list[Tensor]) -> bool:
    now = photograph(made)
    return len(now) == len(before) and all(map(same_bits, now, before))


def refusal(world: World, act: Callable[[], object]) -> str:
    """Return what an act was refused with: every rank must have refused; or nothing, if none has."""
    try:
        act()
    except (ValueError, TypeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = ""
    counted = torch.tensor([float(bool(text))])
    dist.all_reduce(counted)
    assert counted.item() in (0, world.size), f"{int(counted.item())} of {world.size} ranks refused; here: {text!r}"
    return text
