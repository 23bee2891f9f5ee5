"""What a sharded optimizer must do, as functions that run on every rank and return what is wrong: [] if nothing is.

Tests and mutations run the same functions.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.world.world import World
from support.data_parallel import parts_from_rank_0
from support.zero_models import own_groups
from support.zero_optimizer import Pair, pair

WITHOUT = ("up.bias", "embed.weight", "none")
LATE = ("two", "permuted")


def wrong_steps(made: Pair, steps: int = 3) -> list[str]:
    """Step on drawn gradients; some parameters have none in the second step."""
    for step in range(steps):
        made.draw(step, WITHOUT if step == 1 else ())
        made.step()
    return made.apart()


def without_late(module: nn.Module) -> list[dict[str, Any]]:
    """Leave a few parameters for later."""
    late = {id(parameter) for name, parameter in module.named_parameters() if name in LATE}
    return [
        {**group, "params": [each for each in group["params"] if id(each) not in late]} for group in own_groups(module)
    ]


def eventful(made: Pair) -> list[str]:
    """Let everything happen that may: a scheduler, a closure, a group that comes late, clipping, settings changed."""
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (made.optimizer, made.reference)]
    problems = []
    for step in range(6):
        made.draw(step, WITHOUT if step == 1 else ())
        if step == 2:
            answers = [each.step(lambda: 3.5) for each in (made.optimizer, made.reference)]
            problems += [] if answers == [3.5, 3.5] else [f"closure: {answers}"]
            continue
        if step == 3:
            for module, optimizer in ((made.module, made.optimizer), (made.twin, made.reference)):
                late = [parameter for name, parameter in module.named_parameters() if name in LATE]
                optimizer.add_param_group({"params": late, "lr": 0.02})
        if step == 4:
            problems += wrong_clip(made)
        if step == 5:
            for optimizer in (made.optimizer, made.reference):
                optimizer.param_groups[1].update(weight_decay=0.3, own_key="kept")
        made.step()
        for scheduler in schedulers:
            scheduler.step()
    return problems + made.apart()


def wrong_clip(made: Pair) -> list[str]:
    """Clip: the norm must be that of all gradients, and each rank must have all of them scaled."""
    wanted = torch.nn.utils.clip_grad_norm_(made.twin.parameters(), 0.5)
    norm = made.optimizer.clip_grad_norm_(0.5)
    far = [
        name
        for (name, mine), other in zip(made.module.named_parameters(), made.twin.parameters(), strict=True)
        if mine.grad is not None and not torch.allclose(mine.grad, other.grad)
    ]
    made.follow()  # the last bits of a norm depend on its order
    return [*(f"{name} is not clipped" for name in far), *([] if torch.allclose(norm.float(), wanted) else ["norm"])]


def wrong_events(world: World, optimizers: list[str]) -> list[str]:
    """Run the same with each optimizer; the state must exist once."""
    problems = []
    for name in optimizers:
        made = pair(name, groups=without_late)
        problems += [
            f"{name}: {each}"
            for each in (*eventful(made), *wrong_share(world, made), *parts_from_rank_0(world, made.module))
        ]
    return problems


def wrong_share(world: World, made: Pair) -> list[str]:
    """The ranks' elements of state must be those of one optimizer, once; a collective."""
    held = torch.tensor(made.own_elements())
    dist.all_reduce(held)
    kept = made.reference.state.values()
    wanted = sum(each.numel() for state in kept for key, each in state.items() if key != "step")
    return [] if held.item() == wanted else [f"{held.item()} elements of state where {wanted} were wanted"]


def written(world: World) -> list[str]:
    """Write to parameters between steps, in place and by `.data`: what is written is what is stepped next."""
    problems = []
    for dtype in (torch.float32, torch.bfloat16):
        made = pair("sgd", dtype=dtype)
        made.draw(0)
        made.step()
        news = [torch.full_like(each, 0.75) for each in made.module.parameters()]
        for place, (mine, other, new) in enumerate(
            zip(made.module.parameters(), made.twin.parameters(), news, strict=True)
        ):
            with torch.no_grad():
                other.copy_(new)
                if place % 3 == 0:
                    mine.copy_(new)
                elif place % 3 == 1:
                    mine.data = new  # as loading by assignment does
                else:
                    mine.data.copy_(new)
        made.draw(1)
        made.step()
        problems += [f"{dtype}: {each}" for each in made.apart()]
    return problems


def wrong_load(world: World) -> list[str]:
    """A state of one process must be what a sharded optimizer goes on with."""
    saved, made = pair("adamw"), pair("adamw")
    for step in range(2):
        saved.draw(step)
        saved.step()
    made.module.load_state_dict(saved.twin.state_dict())
    made.optimizer.load_state_dict(saved.reference.state_dict())
    made.twin, made.reference = saved.twin, saved.reference
    made.draw(2)
    made.step()
    return made.apart()


def wrong_masters(world: World) -> list[str]:
    return wrong_steps(pair("adamw", dtype=torch.bfloat16))


CHECKS: dict[str, Callable[[World], list[str]]] = {
    "events": lambda world: wrong_events(world, ["sgd"]),
    "written": written,
    "load": wrong_load,
    "masters": wrong_masters,
}
