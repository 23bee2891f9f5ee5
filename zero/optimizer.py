"""An optimizer whose state exists once over all ranks: each steps its shard of the parameters, then all gather them.

    gradients (means, however made) ─► own shard ─► one step of `inner` ─► all-gather ─► parameters, whole on every rank

Alone it works after any synchronization of gradients. With `ShardedDataParallel` the gradients arrive as shards, and
the parameters are gathered while the next forward runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.checks import require_member
from muster.ddp.means import Group
from muster.ddp.norms import clip_by, plain_norm, reproducible_norm
from muster.zero import loading, states
from muster.zero.absent import as_it_is
from muster.zero.agreement import require_same, settings_in_words, together
from muster.zero.apart import PARAMS, refuse_duplicates, require_apart
from muster.zero.elementwise import require_elementwise
from muster.zero.flat import FlatParameters, Held
from muster.zero.layout import Slice, runs
from muster.zero.scaling import overflow
from muster.zero.sources import Alone, Source

Parameters = Iterable[Any]
NAMES: Final = "param_names"
_UNSET: Final = object()


class Segment:
    """What the inner optimizer steps as one tensor: slices of one flat tensor's shard that lie side by side."""

    def __init__(self, home: FlatParameters, slices: Sequence[Slice]) -> None:
        self.home = home
        self.slices = slices
        self.begin = slices[0].offset
        self.end = slices[-1].offset + slices[-1].elements
        self.stepped = nn.Parameter(home.stepped[self.begin : self.end], requires_grad=True)


class ShardedOptimizer(torch.optim.Optimizer):
    """Step any element-wise `torch.optim` optimizer on this rank's shard of the parameters.

    Building one is a collective, as are `add_param_group`, `step` and `load_state_dict`: every rank passes the same
    parameters, with the same values, and the same hyper-parameters. `param_groups` lists all parameters, as of an
    optimizer that is not sharded: a learning-rate scheduler drives it. Parameters become views of flat tensors.

    With `masters`, parameters of 16 bits are stepped in a float32 copy of the shard. What is written to a parameter
    between steps counts, and is to be the same on all ranks.

    `inner` is the optimizer of this rank's shards, whose state is the only one that there is; `state` shows it by
    parameter. What it writes into its groups, as a counter of steps, is in `param_groups` after the step and is saved;
    it must be the same on all ranks. The inner step knows nothing of hooks: those registered here run once a step.

    `torch.amp.GradScaler` works where parameters have gradients; a wrapper's need `zero.scaling.ShardedGradScaler`.
    In either case all ranks step, or none does.

    Raises:
        ValueError: the optimizer needs whole tensors, two parameters share memory, this rank is not in the group, or
            the ranks' parameters differ.
    """

    _step_supports_amp_scaling = True  # a GradScaler calls `step` on every rank, and leaves the decision to it

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
        if source is None:
            require_member(process_group)
            source = Alone(process_group)
        self.source = source
        self.group = source.group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.masters = masters
        self.segments: list[list[Segment]] = []  # of each group
        self._agreed: list[dict[str, Any]] = []  # settings of each group that both optimizers had last
        self._kind, self._options = optimizer_cls, kwargs
        self._is_built = False
        with together(self.group):
            require_elementwise(optimizer_cls)
            # A tensor without elements lets the inner optimizer be built, and its settings be checked, before there is
            # one to step: a rank may never have any.
            self.inner = self.fresh({}, [nn.Parameter(torch.zeros(0))])
            self.inner.param_groups.clear()
            self.inner.state.clear()
            with as_it_is():  # parameters may be freed
                super().__init__(params, dict(self.inner.defaults))
        self._shard(self.param_groups)
        self._is_built = True

    def fresh(self, settings: Mapping[str, Any], tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Build an optimizer as the inner one, of one group."""
        return self._kind([{**settings, PARAMS: tensors}], **self._options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyper-parameters of their own: a collective.

        Raises:
            ValueError: on every rank, if a parameter cannot be added on one, or the ranks' groups differ.
        """
        if not self._is_built:  # its checks of all groups come first, then they are compared
            refuse_duplicates(param_group)
            with as_it_is():
                super().add_param_group(param_group)
                self._require_apart()
            return
        known = len(self.param_groups)
        try:
            with together(self.group):
                refuse_duplicates(param_group)
                with as_it_is():
                    super().add_param_group(param_group)
                    self._require_apart()
            self._shard(self.param_groups[known:])
        except Exception:
            del self.param_groups[known:]
            raise

    def _require_apart(self) -> None:
        require_apart(pair for number, group in enumerate(self.param_groups) for pair in _named(group, number))

    def _shard(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Share out new groups, once all ranks are known to have the same."""
        named = [_named(group, len(self.segments) + place) for place, group in enumerate(groups)]
        lines = [
            line
            for group, parameters in zip(groups, named, strict=True)
            for line in (
                f"a group with {settings_in_words(_settings(group))}",
                *(f"parameter {name} {tuple(each.shape)} {each.dtype}" for name, each in parameters),
            )
        ]
        require_same(lines, self.group, "parameters or their groups")
        for group, parameters in zip(groups, named, strict=True):
            wanted = {id(each) for _, each in parameters}
            homes = self.source.homes(parameters)
            segments = [segment for home in homes for segment in self._segments(home, wanted)]
            made = self.fresh(_settings(group), [segment.stepped for segment in segments])
            self.segments.append(segments)
            self.inner.add_param_group(made.param_groups[0])
            self.inner.state.update(made.state)
            self._agreed.append({})
        self.share_settings()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """Step the shard, then make the parameters whole; `keywords` go to the inner optimizer's step.

        A parameter without a gradient is not stepped, as in an optimizer that is not sharded: on all ranks, or on none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.source.mend()
        self.source.collect()
        self.share_settings()
        for segment in self._all():
            gradient = self.source.gradient(segment.home, segment.slices)
            segment.stepped.grad = None if gradient is None else gradient.to(segment.stepped.dtype)
        if not overflow(self, [segment.stepped for segment in self._all()]):
            self.inner.step(**keywords)
        self.share_settings()
        for segment in self._all():
            segment.stepped.grad = None
        self.source.spread()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, whole ones and shards."""
        self.source.forget()
        with as_it_is():
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all ranks is at most `max_norm`; return that before.

        A collective, of one number; where sums are exact, of the same bits as in one process.
        """
        gradients = self.gradients()
        norm_of = reproducible_norm if self.source.exact else plain_norm
        norm = norm_of(gradients, self.group, reduce=True)
        clip_by(self.source.clipped_with(gradients), norm, max_norm)
        return norm

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the mean gradients, to be changed in place before the step."""
        self.source.collect()
        shards = (self.source.gradient(segment.home, segment.slices) for segment in self._all())
        return [shard for shard in shards if shard is not None]

    def held_state(self) -> list[Held]:
        """List this rank's state by parameter and key; the tensors may be filled in place.

        The float32 copy of a parameter of 16 bits is the state "master".
        """
        return [each for _, _, kept in states.held(self) for each in kept]

    @property
    def state(self) -> Any:
        """Show this rank's part of the state by parameter: views of ranges, flat, that may be changed in place.

        It cannot be added to: the inner optimizer has it. `held_state` tells the ranges, too.
        """
        shown = {home.parameters[at.tensor]: parts for home, at, parts in states.slices_of(self) if parts}
        return MappingProxyType(shown)

    @state.setter
    def state(self, given: Any) -> None:
        if given:  # torch.optim.Optimizer sets an empty one
            raise AttributeError("the state of a ShardedOptimizer cannot be set; call load_state_dict() on every rank")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, and the groups; `load_state_dict` takes it on the same rank.

        It is this rank's alone: tools that take a state dict for the same on all ranks, as torch.distributed.checkpoint
        does, are to be given `full_state_dict`.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = states.local(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as the optimizer that is not sharded would: a collective."""
        full = states.full(self, None)
        assert full is not None
        return full

    def consolidate_state_dict(self, recipient_rank: int = 0) -> dict[str, Any] | None:
        """Return the state of all parameters on one rank of the group, None on the others: a collective.

        Raises:
            ValueError: the group has no such rank.
        """
        if not 0 <= recipient_rank < self.ranks:
            raise ValueError(f"recipient_rank must be a rank of the group, 0 to {self.ranks - 1}, got {recipient_rank}")
        return states.full(self, recipient_rank)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a shard of this rank, or the state of all parameters, saved at any number of ranks: a collective.

        A master is taken for what its parameter is rounded from: load the model's parameters too.

        Raises:
            ValueError: on every rank, if on one it is of other parameters, of another shard or of another optimizer;
                nothing has been loaded on any then.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, dict(state_dict)) or state_dict
        loading.load(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        """Name the inner optimizer, the shard and the groups."""
        kind = f"{self._kind.__name__}, rank {self.rank} of {self.ranks}"
        return super().__repr__().replace("ShardedOptimizer (", f"ShardedOptimizer of {kind} (", 1)

    def __getstate__(self) -> Any:
        """Refuse to be copied or pickled: a shard belongs to its rank, its group and these very parameters.

        Raises:
            TypeError: always; the message says what to save.
        """
        raise TypeError("a ShardedOptimizer cannot be copied or pickled; save its state_dict() or full_state_dict()")

    def share_settings(self) -> None:
        """Let both optimizers have what either has written into its groups; where both have, what is set here counts.

        The caller sets learning rates; the inner optimizer may keep counters and estimates there, and change them in
        its step or in a method of its own.
        """
        for outer, inner, agreed in zip(self.param_groups, self.inner.param_groups, self._agreed, strict=True):
            own = _settings(outer)
            for key, value in _settings(inner).items():
                if value is not agreed.get(key, _UNSET) and own.get(key, _UNSET) is agreed.get(key, _UNSET):
                    outer[key] = value
            agreed.clear()
            agreed.update(_settings(outer))
            inner.update(agreed)

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


def _named(group: Mapping[str, Any], number: int) -> list[tuple[str, nn.Parameter]]:
    names = group.get(NAMES) or [f"groups[{number}][{place}]" for place in range(len(group[PARAMS]))]
    return list(zip(names, group[PARAMS], strict=True))
