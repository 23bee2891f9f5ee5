"""An optimizer whose state exists once over all ranks: each steps its shard of the parameters, then all gather them.

    gradients (means, however made) ─► own shard ─► one step of `inner` ─► all-gather ─► parameters, whole on every rank

Alone it works after any synchronization of gradients. With `ShardedDataParallel` the gradients arrive as shards, and
the parameters are gathered while the next forward runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.checks import require_member
from ddp.norms import clip_by, plain_norm, reproducible_norm
from zero import states
from zero.elementwise import require_elementwise
from zero.flat import FlatParameters, Held
from zero.layout import Slice, runs
from zero.sources import Alone, Source

Group = dist.ProcessGroup | None
Parameters = Iterable[Any]
PARAMS: Final = "params"
NAMES: Final = "param_names"


class Segment:
    """What the inner optimizer steps as one tensor: slices of one flat tensor's shard that lie side by side."""

    def __init__(self, home: FlatParameters, slices: Sequence[Slice]) -> None:
        self.home = home
        self.slices = slices
        self.begin = slices[0].offset
        self.end = slices[-1].offset + slices[-1].elements
        self.stepped = nn.Parameter(home.stepped[self.begin : self.end], requires_grad=True)

    def gradient(self) -> Tensor | None:
        """Return its part of the shard's gradient, in the type that is stepped."""
        shard = self.home.grad
        return None if shard is None else shard[self.begin : self.end].to(self.stepped.dtype)


class ShardedOptimizer(torch.optim.Optimizer):
    """Step any element-wise `torch.optim` optimizer on this rank's shard of the parameters.

    Every rank passes the same parameters, or groups of them, and hyper-parameters. `param_groups` lists all of them, as
    of an optimizer that is not sharded: a learning-rate scheduler drives it. Parameters become views of flat tensors.

    With `masters`, parameters of 16 bits are stepped in a float32 copy of the shard.

    `inner` is the optimizer of this rank's shards, whose state is the only one that there is.

    Raises:
        ValueError: the optimizer needs whole tensors, this rank is not in the group, or the ranks' parameters differ.
    """

    def __init__(
        self,
        params: Parameters,
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: Group = None,
        *,
        masters: bool = True,
        source: Source | None = None,
        **kwargs: Any,
    ) -> None:
        require_elementwise(optimizer_cls)
        if source is None:
            require_member(process_group)
            source = Alone(process_group)
        self.source = source
        self.group = source.group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.masters = masters
        self.segments: list[list[Segment]] = []  # of each group
        # A tensor without elements lets the inner optimizer be built, and its settings be checked, before there is one
        # to step: a rank may never have any.
        self.inner: torch.optim.Optimizer = optimizer_cls([nn.Parameter(torch.zeros(0))], **kwargs)
        self.inner.param_groups.clear()
        super().__init__(params, dict(self.inner.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyper-parameters of their own: a collective."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names") or [f"{len(self.param_groups) - 1}.{i}" for i in range(len(group[PARAMS]))]
        try:
            homes = self.source.homes(list(zip(names, group[PARAMS], strict=True)))
        except (ValueError, RuntimeError):
            self.param_groups.pop()
            raise
        wanted = {id(each) for each in group[PARAMS]}
        segments = [segment for home in homes for segment in self._segments(home, wanted)]
        self.segments.append(segments)
        self.inner.add_param_group({**_settings(group), PARAMS: [segment.stepped for segment in segments]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """Step the shard, then make the parameters whole; `keywords` go to the inner optimizer's step.

        A parameter without a gradient is not stepped, as in an optimizer that is not sharded.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.source.collect()
        for outer, inner, segments in zip(self.param_groups, self.inner.param_groups, self.segments, strict=True):
            inner.update(_settings(outer))
            for segment in segments:
                out = any(self.source.left_out(segment.home, at) for at in segment.slices)
                segment.stepped.grad = None if out else segment.gradient()
        self.inner.step(**keywords)
        for segment in self._all():
            segment.stepped.grad = None
        self.source.spread()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, whole ones and shards."""
        self.source.forget()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all ranks is at most `max_norm`; return that before.

        A collective, of one number; where sums are exact, of the same bits as in one process.
        """
        gradients = self.gradients()
        norm_of = reproducible_norm if self.source.exact else plain_norm
        norm = norm_of(gradients, self.group, reduce=True)
        clip_by(gradients, norm, max_norm)
        return norm

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the mean gradients, to be changed in place before the step."""
        self.source.collect()
        return [
            segment.home.grad[segment.begin : segment.end]
            for segment in self._all()
            if segment.home.grad is not None
            and not any(self.source.left_out(segment.home, at) for at in segment.slices)
        ]

    def held_state(self) -> list[Held]:
        """List this rank's state by parameter and key; the tensors may be filled in place.

        The float32 copy of a parameter of 16 bits is the state "master".
        """
        return states.held(self.segments, self.inner)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, and the groups; `load_state_dict` takes it on the same rank."""
        return states.local(self)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as the optimizer that is not sharded would: a collective."""
        full = states.full(self, None)
        assert full is not None
        return full

    def consolidate_state_dict(self, recipient_rank: int = 0) -> dict[str, Any] | None:
        """Return the state of all parameters on one rank of the group, None on the others: a collective."""
        return states.full(self, recipient_rank)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a shard of this rank, or the state of all parameters, saved at any number of ranks.

        Raises:
            ValueError: it is of other parameters, of another shard, or not a state dict; nothing has been loaded then.
        """
        states.load(self, state_dict)

    def _segments(self, home: FlatParameters, wanted: set[int]) -> list[Segment]:
        if self.masters and home.dtype.itemsize == 2:
            home.make_masters()
        ours = [id(each) in wanted for each in home.parameters]
        kinds: list[object] = [
            (True if self.source.joins else place) if our else None for place, our in enumerate(ours)
        ]
        return [Segment(home, joined) for joined in runs(home.slices, kinds)]

    def _all(self) -> Iterator[Segment]:
        return chain.from_iterable(self.segments)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in (PARAMS, NAMES)}
