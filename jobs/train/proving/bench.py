"""The test bench for one probe on one rank: the user's class, the other ranks, and the rows of the result table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.train.proving import toys
from muster.jobs.train.proving.kinds import UserClass
from muster.jobs.train.proving.traffic import Traffic
from muster.jobs.world.world import World

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

Row = dict[str, str]  # name, state (ok, fails, n/a), evidence
Module = TypeVar("Module", bound=nn.Module)
WORST_FIRST: Final = ("fails", "ok", "n/a")


@dataclass
class Bench:
    """One probe of a class on one rank. `mark` records the current step and restarts the timeout for stuck code."""

    world: World
    user: UserClass
    settings: "TrainSettings"
    steps: int
    traffic: Traffic
    control: dist.ProcessGroup  # for the bench's own exchanges; the default group is only for the user's class
    mark: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.world.device

    def row(self, name: str, ok: bool | None, evidence: str) -> None:
        """Add a row; `ok` is None for a property that does not apply."""
        state = "n/a" if ok is None else "ok" if ok else "fails"
        self.rows.append({"name": name, "state": state, "evidence": evidence})

    def judge(self, name: str, wrong: str, right: str) -> None:
        """Add a row that fails if `wrong` is not empty. Its evidence is `wrong`, or `right` if the row passes."""
        self.row(name, not wrong, wrong or right)

    def place(self, module: Module) -> Module:
        """Move a module to this rank's device, in float64."""
        return module.to(self.device, torch.float64)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's toy batch of a step."""
        return toys.batch(step, self.world.rank, self.device)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the toy batches of all ranks."""
        return [toys.batch(step, rank, self.device) for rank in range(self.world.size)]

    def everywhere(self, mine: Any) -> list[Any]:
        """Gather a value from every rank: a collective."""
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, mine, group=self.control)
        return gathered

    @contextmanager
    def own_code(self, step: int, what: str = "step") -> Iterator[None]:
        """Mark the user's code as running. Afterwards wait for all ranks, so that steps do not overlap."""
        self.mark(f"{what} {step}")
        yield
        self.mark("")
        self.everywhere(None)


def gradients_alone(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the gradients of each batch alone, by parameter name; clear the module's gradients."""
    found = []
    for inputs, targets in batches:
        module.zero_grad(set_to_none=True)
        toys.loss_of(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        named = module.named_parameters()
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named if p.requires_grad})
    module.zero_grad(set_to_none=True)
    return found


def mean_of(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean over ranks of each named gradient."""
    return {name: torch.stack([each[name] for each in gradients]).mean(0) for name in gradients[0]}


def copy_into(module: nn.Module, reference: nn.Module) -> None:
    """Copy all parameters and buffers of a reference into a module with the same names."""
    with torch.no_grad():
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in [*reference.named_parameters(), *reference.named_buffers()]:
            own[name].copy_(tensor)


def finish(wrapped: Any) -> None:
    """Call `finish_gradient_synchronization()` if the class has it."""
    end = getattr(wrapped, "finish_gradient_synchronization", None)
    if end is not None:
        end()


def merged(rows_of_ranks: list[list[Row]]) -> list[Row]:
    """Merge the rows of all ranks into one row per property. A failure on any rank makes the row fail."""
    table: dict[str, Row] = {}
    for rank, rows in enumerate(rows_of_ranks):
        for row in rows:
            said = f"rank {rank}: {row['evidence']}" if row["state"] == "fails" else row["evidence"]
            known = table.get(row["name"])
            if known is None or WORST_FIRST.index(row["state"]) < WORST_FIRST.index(known["state"]):
                table[row["name"]] = {**row, "evidence": said}
    return list(table.values())
