"""Asynchronous SGD with parameter servers, as an optimizer.

    optimizer = AsynchronousOptimizer(model.parameters(), torch.optim.SGD, group, lr=0.1)
    loss.backward()
    optimizer.step()          # pushes the gradients, pulls the new parameters; waits for no other worker
    ...
    optimizer.finish()        # serves the other workers until they have finished, too

A step divides the gradient by the number of workers. So with plain SGD and without staleness, one step of every worker
equals one synchronous step with the mean of their gradients. Sources: Dean et al. 2012, Li et al. 2014.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.asynchronous.links import TAG, open_links, uses_nccl
from muster.ddp.asynchronous.server import LEAVE, PULL, PUSH, ParameterServer
from muster.ddp.asynchronous.shards import bounds


class AsynchronousOptimizer(torch.optim.Optimizer):
    """An optimizer that updates parameters on parameter servers.

    The constructor is a collective of `group`, a gloo group: it sets the parameters to the values of rank 0, and makes
    them views of one flat tensor. Ranks 0 to `servers` - 1 of the group serve one shard each (default: all ranks).
    `kind` is a class of element-wise optimizers, and `options` are its keyword arguments. A parameter without a
    gradient is treated as if its gradient were 0. CUDA tensors are sent over NCCL if the default group uses it, else
    through pinned host memory (see `links`).

    If a rank that serves no shard is lost, all other ranks continue to work.

    Attributes:
        staleness: for each server, the staleness of the last gradient (see `ParameterServer`).
        server: this rank's server, or None.

    Raises:
        ValueError: if the parameters have several dtypes or devices, or `servers` is not from 1 to the number of ranks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        kind: Callable[..., torch.optim.Optimizer],
        group: dist.ProcessGroup,
        *,
        servers: int | None = None,
        **options: Any,
    ) -> None:
        trained = [each for each in parameters if each.requires_grad]
        self.group, self.rank, self.workers = group, dist.get_rank(group), dist.get_world_size(group)
        count = self.workers if servers is None else servers
        if not 1 <= count <= self.workers:
            raise ValueError(f"servers must be from 1 to the number of ranks, {self.workers}, got {servers}")
        if len({(each.dtype, each.device) for each in trained}) != 1:
            raise ValueError("parameters must have one dtype and be on one device, and at least one must be trainable")
        super().__init__(trained, {"lr": options["lr"], "fused": False})
        self._values = torch.cat([each.detach().reshape(-1) for each in trained])
        self._gradient = torch.zeros_like(self._values)
        sizes = [each.numel() for each in trained]
        self._slots = [slot.view_as(p) for slot, p in zip(torch.split(self._gradient, sizes), trained, strict=True)]
        for parameter, slot in zip(trained, torch.split(self._values, sizes), strict=True):
            parameter.data = slot.view_as(parameter)
        first = self._values.cpu()  # the same memory, if it is on the host
        dist.broadcast(first, group=group, group_src=0)
        self._values.copy_(first)
        device = self._values.device
        self._sent = [self._values, self._gradient]  # what travels: on the device for NCCL, else in host memory
        self._copied = device.type == "cuda" and not uses_nccl(device)
        if self._copied:
            self._sent = [torch.empty_like(each, device="cpu", pin_memory=True) for each in self._sent]
        self.bounds = [(start, stop) for start, stop in bounds(len(self._values), count) if start < stop]
        self._links = open_links(group, range(len(self.bounds)), device)
        self.staleness = [0] * len(self.bounds)
        self.on_wait: Callable[[bool], None] = lambda begins: None  # called with True before communication, False after
        self.server: ParameterServer | None = None
        if self.rank < len(self.bounds):
            start, stop = self.bounds[self.rank]
            shard = nn.Parameter(self._values[start:stop].clone())
            if uses_nccl(device):
                _load_kernels(shard, kind, options)
            links = {worker: link for (worker, server), link in self._links.items() if server == self.rank}
            room = self._sent[0][start:stop]
            self.server = ParameterServer(shard, kind([shard], **options), group, links, room)
            served = self.server.optimizer.state  # some optimizers create their state in the first step
            self.state[shard] = {"values": shard.data, "gradient": shard.grad, "served": served}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Push the gradients to all servers, and pull the updated parameters.

        Raises:
            RuntimeError: if a server is lost.
        """
        for group in self.param_groups:
            for slot, parameter in zip(self._slots, group["params"], strict=True):
                slot.zero_() if parameter.grad is None else slot.copy_(parameter.grad)
        if self.workers > 1:
            self._gradient.div_(self.workers)
        if self._copied:
            self._sent[1].copy_(self._gradient)
        self.on_wait(True)
        self.staleness = self._exchange(PUSH)
        self.on_wait(False)

    def pull(self) -> None:
        """Pull the newest parameters from all servers."""
        self._exchange(PULL)

    def finish(self) -> None:
        """Leave all servers, and serve this rank's shard until every other worker has left or is lost.

        Raises:
            RuntimeError: if an update of this rank's shard failed.
        """
        for server in range(len(self.bounds)):
            if server != self.rank:
                dist.send(self._request(LEAVE), group=self.group, group_dst=server, tag=TAG)
                self._links[self.rank, server].close()
        if self.server is not None:
            self.server.join()

    def _request(self, what: float) -> Tensor:
        return torch.tensor([what, self.param_groups[0]["lr"]], dtype=torch.float64)

    def _exchange(self, what: float) -> list[int]:
        """Send a request to all servers, and receive all replies; return the staleness that each server reports."""
        values, gradient = self._sent
        request = self._request(what)
        requests, pushes = list[dist.Work | None](), list[Callable[[], object]]()
        remote = [each for each in range(len(self.bounds)) if each != self.rank]
        for server in remote:
            start, stop = self.bounds[server]
            requests.append(dist.isend(request, group=self.group, group_dst=server, tag=TAG))
            if what == PUSH:
                pushes.append(self._links[self.rank, server].push(gradient[start:stop]))
        for sent in pushes:
            sent()
        found = [0] * len(self.bounds)
        if self.server is not None:
            start, stop = self.bounds[self.rank]
            if what == PUSH:
                lr = self.param_groups[0]["lr"]
                found[self.rank] = self.server.push(self.rank, gradient[start:stop], lr, values[start:stop])
            else:
                self.server.pull(self.rank, values[start:stop])
        reply = torch.empty(2, dtype=torch.float64)
        for server in remote:
            start, stop = self.bounds[server]
            dist.recv(reply, group=self.group, group_src=server, tag=TAG + 1)
            self._links[self.rank, server].replied(values[start:stop])
            found[server] = int(reply[0])
        for work in requests:
            if work is not None:
                work.wait()
        if self._copied:
            self._values.copy_(values)
        return found


def _load_kernels(shard: Tensor, kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Step a copy of a shard once, so that the servers' threads load no kernels and allocate no memory later.

    Both can wait for all kernels of the device, and a message of NCCL that waits for this rank would then wait forever.
    """
    copied = nn.Parameter(shard.detach().clone())
    copied.grad = torch.zeros_like(copied)
    kind([copied], **options).step()
    torch.cuda.synchronize(shard.device)
