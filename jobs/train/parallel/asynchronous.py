"""A copy of the layers whose optimizer is on parameter servers: mode asynchronous, by `ddp/asynchronous`."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.asynchronous.optimizer import AsynchronousOptimizer
from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.optim import make_state, recipe
from muster.jobs.train.parallel.replica import Replica, require_all_used
from muster.jobs.world.world import COLLECTIVE_TIMEOUT_S
from muster.zero.elementwise import require_elementwise

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class AsynchronousReplica(Replica):
    """A worker's copy. Gradients are not averaged: each goes to the servers, which update the parameters with it.

    Between GPUs gradients and shards travel over NCCL, all other messages over gloo (`ddp/asynchronous/links.py`).
    """

    optimizer: AsynchronousOptimizer
    shares_buffers = False
    not_timed = "parameter servers communicate point to point"

    def build_optimizer(self, numerics: Numerics, settings: "TrainSettings") -> torch.optim.Optimizer:
        """Build the optimizer, and start this rank's server: a collective.

        Raises:
            RefusedError: if the job's optimizer cannot step shards.
        """
        trained = [each for each in self.module.parameters() if each.requires_grad]
        kind, options = recipe(trained, settings.optimizer, cut_anywhere=numerics.cut_anywhere)
        try:
            require_elementwise(kind)
        except ValueError as error:
            raise RefusedError(f"train.optimizer: {error}") from error

        def build(parameters: list[torch.nn.Parameter], **given: Any) -> torch.optim.Optimizer:
            optimizer = kind(parameters, **given)
            make_state(optimizer, settings.optimizer)
            return optimizer

        # Limit for the time between two messages of a worker, equal to the timeout of collectives in other modes.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        assert group is not None
        self.optimizer = AsynchronousOptimizer(trained, build, group, servers=settings.servers, **options)
        self.optimizer.on_wait = lambda begins: self.clock.lap("optimizer" if begins else "communication")
        return self.optimizer

    def gradients(self) -> list[Tensor]:
        """Return this worker's gradients.

        Raises:
            RefusedError: if a parameter has none.
        """
        named = self.module.named_parameters()
        require_all_used("asynchronous", [name for name, each in named if each.requires_grad and each.grad is None])
        return super().gradients()

    def figures(self) -> dict[str, Tensor]:
        """Return the staleness of the last gradient, its mean over the servers."""
        staleness = self.optimizer.staleness
        return {"staleness": torch.tensor(sum(staleness) / len(staleness))}
