"""An optimizer with sharded state: each rank steps its shard of the parameters, then all ranks gather them.

    gradients (means, however computed) ─► own shard ─► a step of `inner` ─► all-gather ─► whole parameters on every
    rank

Without a wrapper, the optimizer works after any synchronization of gradients. With `ShardedDataParallel`, gradients
arrive as shards, and the parameters are gathered during the next forward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.checks import require_dense_tensors, require_member
from muster.ddp.means import Group
from muster.ddp.norms import clip_by, plain_norm, reproducible_norm
from muster.zero import loading, states
from muster.zero.absent import as_it_is
from muster.zero.agreement import require_same, settings_in_words, together
from muster.zero.apart import PARAMS, refuse_duplicates, require_apart
from muster.zero.elementwise import require_elementwise
from muster.zero.flat import FlatParameters, ParameterRange
from muster.zero.kinds import slices_of
from muster.zero.layout import runs
from muster.zero.scaling import overflow
from muster.zero.segments import NAMES, Segment, SegmentedOptimizer, settings_of
from muster.zero.sources import Alone, Source

Parameters = Iterable[Any]


class ShardedOptimizer(SegmentedOptimizer):
    """An optimizer that applies any element-wise `torch.optim` optimizer to this rank's shard of the parameters.

    The constructor, `add_param_group`, `step` and `load_state_dict` are collectives. Every rank must pass the same
    parameters, with the same values, and the same hyper-parameters. `param_groups` lists all parameters, as in an
    optimizer that is not sharded, so learning-rate schedulers work. Parameters become views of flat tensors.
    Without a wrapper, parameters that are not row-major keep their memory.

    With `masters`, 16-bit parameters are stepped in a float32 copy of the shard. Values that the user writes to a
    parameter between steps are kept, and must be the same on all ranks.

    `inner` is the optimizer of this rank's shards. The inner optimizer owns all state; `state` lists it by parameter.
    If it writes values into its groups, such as a step counter, these must be the same on all ranks. They are saved,
    and appear in `param_groups` after the step. Hooks registered on this optimizer run once per step, outside the inner
    step.

    Without a wrapper, `torch.amp.GradScaler` works; with one, use `zero.scaling.ShardedGradScaler`. In both cases,
    either all ranks step or no rank steps.

    Raises:
        ValueError: If the optimizer needs whole tensors, two parameters share memory, this rank is not in the group, or
            the ranks' parameters differ.
    """

    _step_supports_amp_scaling = True  # a GradScaler calls `step` on every rank, and `step` decides whether to skip

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
        self.segments: list[list[Segment]] = []  # one list per group
        self._agreed: list[dict[str, Any]] = []  # settings of each group after the last exchange
        self._kind, self._options = optimizer_cls, kwargs
        self._is_built = False
        with together(self.group):
            require_elementwise(optimizer_cls)
            # Check the settings now, with an empty tensor, because this rank may never have elements to step.
            self.inner = self.fresh({}, [nn.Parameter(torch.zeros(0))])
            self.inner.param_groups.clear()
            self.inner.state.clear()
            with as_it_is():  # the memory of the parameters may be freed
                super().__init__(params, dict(self.inner.defaults))
        self._shard(self.param_groups)
        self._is_built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own hyper-parameters. A collective.

        Raises:
            ValueError: On every rank, if one rank cannot add a parameter, or the ranks' groups differ.
        """
        if not self._is_built:  # called by the constructor, which compares the ranks' groups later
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
        named = [pair for number, group in enumerate(self.param_groups) for pair in _named(group, number)]
        require_dense_tensors("parameter", named)
        require_apart(named)

    def _shard(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Shard new groups, after checking that all ranks have the same groups."""
        named = [_named(group, len(self.segments) + place) for place, group in enumerate(groups)]
        lines = [
            line
            for group, parameters in zip(groups, named, strict=True)
            for line in (
                f"a group with {settings_in_words(settings_of(group))}",
                *(f"parameter {name} {tuple(each.shape)} {each.dtype}" for name, each in parameters),
            )
        ]
        require_same(lines, self.group, "parameters or their groups")
        for group, parameters in zip(groups, named, strict=True):
            wanted = {id(each) for _, each in parameters}
            flat_parameters = self.source.flat_parameters(parameters)
            segments = [
                segment for flat_parameter in flat_parameters for segment in self._segments(flat_parameter, wanted)
            ]
            made = self.fresh(settings_of(group), [segment.stepped for segment in segments])
            self.segments.append(segments)
            self.inner.add_param_group(made.param_groups[0])
            self.inner.state.update(made.state)
            self._agreed.append({})
        self.share_settings()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """Step the shard, then gather the parameters. `keywords` are passed to the inner optimizer's step.

        A parameter without a gradient is not stepped, as in an optimizer that is not sharded. On all ranks, the same
        parameters must have gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.source.mend()
        self.source.collect()
        self.share_settings()
        for segment in self._all():
            gradient = self.source.gradient(segment.flat_parameter, segment.slices)
            segment.stepped.grad = None if gradient is None else gradient.to(segment.stepped.dtype)
        if not overflow(self, [segment.stepped for segment in self._all()]):
            self.inner.step(**keywords)
        self.share_settings()
        for segment in self._all():
            segment.stepped.grad = None
        self.source.spread()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, whole or sharded, or replace them by zeros."""
        self.source.forget(set_to_none=set_to_none)
        with as_it_is():
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all ranks is at most `max_norm`. Return the old norm.

        This collective sends a few numbers. If sums are exact, the norm has the same
        bits as in one process.
        """
        gradients = self.gradients()
        norm_of = reproducible_norm if self.source.exact else plain_norm
        norm = norm_of([_real(each) for each in gradients], self.group, reduce=True)
        clip_by([_real(each) for each in self.source.clipped_with(gradients)], norm, max_norm)
        return norm

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the mean gradients, which may be changed in place before the step."""
        self.source.collect()
        shards = (self.source.gradient(segment.flat_parameter, segment.slices) for segment in self._all())
        return [shard for shard in shards if shard is not None]

    def held_state(self) -> list[ParameterRange]:
        """List the tensors of this rank's state by parameter and key. They may be filled in place.

        The float32 copy of a 16-bit parameter has the key "master".
        """
        return list(states.held(self))

    @property
    def state(self) -> Any:
        """This rank's part of the state by parameter: flat views of ranges, which may be changed in place.

        Entries cannot be added, because the inner optimizer owns the state. `held_state` returns the state together
        with the ranges.
        """
        shown = {
            flat_parameter.parameters[at.tensor]: {**whole, **split}
            for flat_parameter, at, split, whole in slices_of(self)
            if split or whole
        }
        return MappingProxyType(shown)

    @state.setter
    def state(self, given: Any) -> None:
        if given:  # the constructor of torch.optim.Optimizer sets an empty state
            raise AttributeError("the state of a ShardedOptimizer cannot be set; call load_state_dict() on every rank")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, and the groups. The shard can only be loaded on the same rank.

        For tools that expect the same state dict on all ranks, such as torch.distributed.checkpoint, use
        `full_state_dict`.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = states.local(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, in the form of an optimizer that is not sharded. A collective."""
        full = states.full(self, None)
        assert full is not None
        return full

    def consolidate_state_dict(self, recipient_rank: int = 0) -> dict[str, Any] | None:
        """Return the state of all parameters on one rank of the group, and None on all other ranks. A collective.

        Raises:
            ValueError: If the group has no such rank.
        """
        if not 0 <= recipient_rank < self.ranks:
            raise ValueError(f"recipient_rank must be a rank of the group, 0 to {self.ranks - 1}, got {recipient_rank}")
        return states.full(self, recipient_rank)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's shard, or the state of all parameters, saved with any number of ranks. A collective.

        Also load the model's parameters, because a loaded master is assumed to round to its parameter.

        Raises:
            ValueError: On every rank, before anything is loaded, if the state on one rank belongs to other parameters,
                another shard or another optimizer.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, dict(state_dict)) or state_dict
        loading.load(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        """Describe the optimizer: the class of the inner optimizer, the rank and the groups."""
        kind = f"{self._kind.__name__}, rank {self.rank} of {self.ranks}"
        return super().__repr__().replace("ShardedOptimizer (", f"ShardedOptimizer of {kind} (", 1)

    def __getstate__(self) -> Any:
        """Refuse copies and pickles, because a shard is tied to its rank, process group and parameters.

        Raises:
            TypeError: Always. The message says what to do instead.
        """
        raise TypeError("a ShardedOptimizer cannot be copied or pickled; save its state_dict() or full_state_dict()")

    def _segments(self, flat_parameter: FlatParameters, wanted: set[int]) -> list[Segment]:
        if self.masters and flat_parameter.dtype.itemsize == 2:
            flat_parameter.make_masters()
        ours = [id(each) in wanted for each in flat_parameter.parameters]
        kinds: list[object] = [
            (True if self.source.joins else place) if our else None for place, our in enumerate(ours)
        ]
        return [Segment(flat_parameter, joined) for joined in runs(flat_parameter.slices, kinds)]

    def _all(self) -> Iterator[Segment]:
        return chain.from_iterable(self.segments)


def _real(gradient: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _named(group: Mapping[str, Any], number: int) -> list[tuple[str, nn.Parameter]]:
    names = group.get(NAMES) or [f"groups[{number}][{place}]" for place in range(len(group[PARAMS]))]
    return list(zip(names, group[PARAMS], strict=True))
