"""ZeRO for any module: gradients are reduce-scattered instead of all-reduced, and parameters are all-gathered.

    stage   a rank stores                     sends, as multiples of (n - 1) / n x the model
    1       parameters, gradients, 1/n state  1 x gradients scattered in the backward, 1 x parameters gathered in the
    2       parameters, 1/n gradients, state  the same                                                   next forward
    3       1/n of all                        2 x parameters gathered, in forward and backward; 1 x gradients scattered

    model = ShardedDataParallel(module, stage=2)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    model(inputs).sum().backward()
    optimizer.step()                  # each rank steps its shard; then the parameters are gathered

Source: Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models".
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.base import trainable_parameters
from muster.ddp.buckets import require_size
from muster.ddp.compiler import outside
from muster.ddp.gradients import Named, deal
from muster.ddp.malloc import keep_freed_memory
from muster.ddp.reduced import Reduced
from muster.ddp.reducer import Reducer
from muster.zero.flat import FlatParameters, by_kind
from muster.zero.gather import Gather, SharedMemoryGather, gather_for
from muster.zero.gradients import Gradients, KeptGradients, PassingGradients
from muster.zero.scatter import UNDER_WAY, Scatter, SharedMemoryScatter, scatter_for
from muster.zero.sharded import Sharded
from muster.zero.shared_memory import shared_memory_peers
from muster.zero.unit_states import UnitState, UnitStates
from muster.zero.units import ROOT, Unit, Units, names_of, units_of
from muster.zero.whole import AlwaysWhole, Residency, in_backward

Stage = Literal[1, 2, 3]
Accumulate = Literal["local", "sharded"]
STAGES: Final = (1, 2, 3)


class ShardedDataParallel(Sharded, Reduced):
    """Wrap a module so that optimizer state (from stage 1), gradients (from stage 2) and parameters (stage 3) are
    sharded.

    The constructor is a collective: it broadcasts parameters and buffers from the group's rank 0. Parameters become
    row-major views of flat tensors, so move and cast the module before wrapping it.

    `units` are modules, or tuples of modules that run one after the other, whose parameters are gathered (and in stage
    3 freed) together. All other parameters form the root unit, which is gathered first and kept through the step. By
    default, the units in stage 3 are the module's children; lists and sequences are replaced by their children. In
    stages 1 and 2 there are no units by default, and a forward waits for all parameters. Only a unit's own modules may
    use its parameters, and only while they run. In stage 3, all ranks must run the same units in the same order,
    because each gather is a collective. On CPUs, the order is checked before each step.

    With `accumulate` "local", whole gradients accumulate on each rank within `no_sync()`. With "sharded", every
    backward is synchronized, so in stages 2 and 3 a rank has at most two buckets of whole gradients.

    With `compute_dtype` (stage 3; bfloat16 or float16), float32 parameters are gathered in that dtype, and their
    gradients are computed and averaged in it. Shards, optimizer states and state dicts stay in float32. Floating
    tensors among the inputs are cast; buffers are not. Pass `communication_dtype=torch.float32` to average in float32.

    After a synchronization no parameter has a `.grad`, because the optimizer has this rank's shard of the mean.
    `full_gradients()` gathers the shards. To clip, call the optimizer's `clip_grad_norm_`; PyTorch's function raises an
    error.

    Raises:
        ValueError: As in `DataParallel`; if a stage, unit or setting is invalid; or if a parameter shares memory with
        another parameter, a buffer, or an attribute of a module.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        stage: Stage,
        units: Units | None = None,
        bucket_size_mb: float | None = 25.0,
        exact: bool = False,
        accumulate: Accumulate = "local",
        reshard_after_forward: bool = True,
        find_unused_parameters: bool = False,
        communication_dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = False,
    ) -> None:
        if stage not in STAGES:
            raise ValueError(f"stage must be 1, 2 or 3, got {stage!r}")
        if accumulate not in ("local", "sharded"):
            raise ValueError(f"accumulate must be 'local' or 'sharded', got {accumulate!r}")
        if exact and accumulate == "sharded":
            raise ValueError(
                "exact sums need whole gradients on each rank, but accumulate is 'sharded'; drop one of the two"
            )
        if compute_dtype is not None and (stage != 3 or compute_dtype not in (torch.bfloat16, torch.float16)):
            raise ValueError(
                f"compute_dtype must be torch.bfloat16 or torch.float16, in stage 3; got {compute_dtype} in stage "
                f"{stage}"
            )
        require_size(bucket_size_mb)
        self.stage = stage
        self.compute_dtype = compute_dtype
        self.accumulate = accumulate
        self.bucket_size_mb = bucket_size_mb
        self.reshard_after_forward = reshard_after_forward
        self._asked_units = (
            None if units is None else list(units)
        )  # a list, because a ModuleList would become a submodule
        super().__init__(
            module,
            process_group,
            exact=exact,
            find_unused_parameters=find_unused_parameters,
            communication_dtype=communication_dtype,
            broadcast_buffers=broadcast_buffers,
        )

    def _prepare(self) -> None:
        _refuse_complex(self.trainable())
        rank = dist.get_rank(self.process_group)
        named = list(self.module.named_parameters())
        # If a rank stores only masters of its 16-bit parameters, other ranks cannot read the parameters in shared
        # memory.
        rounds = self.stage == 3 and (self.compute_dtype or any(each.itemsize == 2 for _, each in named))
        self.peers = None if rounds else shared_memory_peers(self.process_group, self.device)
        gather = gather_for(self.process_group, self.device, self.peers)
        if self.stage < 3:
            everything = [Unit(ROOT, (), tuple(named))]
            units = everything if self._asked_units is None else units_of(self.module, self._asked_units)
            self.flat_parameters = [
                FlatParameters(part, rank=rank, ranks=self.ranks) for part in self._buckets_of(named)
            ]
            self._settle(gather)
            self.residency: Residency = AlwaysWhole(self.module, units, self.flat_parameters, gather, self.weakly())
        else:
            units = units_of(self.module, self._asked_units)
            of_units = [
                [
                    FlatParameters(part, rank=rank, ranks=self.ranks, dtype=self.compute_dtype)
                    for part in by_kind(unit.parameters)
                ]
                for unit in units
            ]
            self._seen_trainable = trainable_parameters(self.module)  # because their dtype may have changed
            self.flat_parameters = [
                flat_parameter for flat_parameters in of_units for flat_parameter in flat_parameters
            ]
            keep_freed_memory()  # because every step allocates and frees the memory of units
            for flat_parameter in self.flat_parameters:
                flat_parameter.split()
            self._settle(gather)
            unit_states = [
                UnitState(unit, flat_parameters, gather, self.weakly())
                for unit, flat_parameters in zip(units, of_units, strict=True)
            ]
            self.residency = UnitStates(self.module, unit_states, gather, reshard=self.reshard_after_forward)
        self.gather = gather
        self.scatter = self._scatter()
        self.scatter.waiting = _weakly(self)
        self._reducer = self._build()
        if isinstance(self.residency, UnitStates) and self._reducer is not None:
            self.residency.launch_with(self._reducer)
        weakref.finalize(self, self.residency.remove).atexit = False

    def _settle(self, gather: Gather) -> None:
        """Move tensors that other ranks read into shared memory: flat tensors or shards, and in stage 1 also gradients.

        Do nothing without `peers`.
        """
        self._flats: dict[int, list[Tensor]] = {}
        if self.peers is None:
            return
        assert isinstance(gather, SharedMemoryGather)
        rank = dist.get_rank(self.process_group)
        lengths = [
            len(flat_parameter.shard) if flat_parameter.is_split else flat_parameter.layout.length
            for flat_parameter in self.flat_parameters
        ]
        shared = self.peers.share(
            [(each, flat_parameter.dtype) for each, flat_parameter in zip(lengths, self.flat_parameters, strict=True)]
        )
        for flat_parameter, tensors in zip(self.flat_parameters, shared, strict=True):
            if flat_parameter.is_split:
                flat_parameter.settle_shard(tensors[rank])
                gather.know(flat_parameter, tensors)
            else:
                flat_parameter.settle(tensors[rank])
                gather.know(flat_parameter, [flat_parameter.parts(whole)[each] for each, whole in enumerate(tensors)])
        if self.stage == 1 and not self.exact and self.communication_dtype is None:
            trainable = [flat_parameter for flat_parameter in self.flat_parameters if flat_parameter.trains]
            gradients = self.peers.share(
                [(flat_parameter.layout.length, flat_parameter.dtype) for flat_parameter in trainable]
            )
            self._flats = {
                id(flat_parameter): tensors for flat_parameter, tensors in zip(trainable, gradients, strict=True)
            }

    def _scatter(self) -> Scatter:
        if self._flats:
            assert self.peers is not None
            return SharedMemoryScatter(self.process_group, self.peers, self._flats)
        at_most = None if self.stage == 1 else UNDER_WAY
        within_host = self.peers is not None and self.stage == 3
        return scatter_for(self.process_group, self.device, exact=self.exact, at_most=at_most, within_host=within_host)

    def _buckets_of(self, named: Named) -> list[Named]:
        """Group parameters for flat tensors: trainable ones as in buckets of gradients, frozen ones by kind."""
        frozen = [(name, each) for name, each in named if not each.requires_grad]
        return [*deal(self.trainable(), self.bucket_size_mb), *by_kind(frozen)]

    def _build(self) -> Reducer[Gradients] | None:
        """Build the reducer.

        In stage 3, it launches the buckets of the last unit first, and those of the root unit last.
        """
        flat_parameters = [flat_parameter for flat_parameter in self.flat_parameters if flat_parameter.trains]
        if self.stage == 3:
            root = {id(flat_parameter) for flat_parameter in self._root_flat_parameters()}
            flat_parameters = [
                flat_parameter for flat_parameter in flat_parameters[::-1] if id(flat_parameter) not in root
            ] + [h for h in flat_parameters if id(h) in root]
        if not flat_parameters:
            return None
        named = [pair for flat_parameter in flat_parameters for pair in flat_parameter.named]
        buckets = [self._gradients(number, flat_parameter) for number, flat_parameter in enumerate(flat_parameters)]
        return Reducer(named, buckets, self.scatter, find_unused=self.find_unused_parameters)

    def _gradients(self, number: int, flat_parameter: FlatParameters) -> Gradients:
        message = None if self.communication_dtype == flat_parameter.dtype else self.communication_dtype
        if self.stage == 1:
            flats = self._flats.get(id(flat_parameter))
            return KeptGradients(
                number, flat_parameter, message, flat=None if flats is None else flats[flat_parameter.rank]
            )
        return PassingGradients(
            number, flat_parameter, message, held=flat_parameter not in self._root_flat_parameters() and self.stage == 3
        )

    def _let_go(self) -> None:
        super()._let_go()
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None

    def _root_flat_parameters(self) -> Sequence[FlatParameters]:
        return self.residency.root.flat_parameters if isinstance(self.residency, UnitStates) else ()

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module. If gradients are enabled, the next backward will synchronize them."""
        if torch.is_grad_enabled() and not in_backward():
            outside(self._begin_forward)
        if self.compute_dtype is not None:
            inputs, keywords = cast_floats((inputs, keywords), self.compute_dtype)
        with self.residency.forward():
            return self.module(*inputs, **keywords)

    def _begin_forward(self) -> None:
        self._detect_changes()
        for flat_parameter in self.flat_parameters:
            if flat_parameter.grad is not None:
                flat_parameter.unsend()
        if self._reducer is not None:
            self._reducer.forward_begins()
        self._share_buffers()

    @property
    def unused(self) -> frozenset[str]:
        """Names of the parameters that no rank used in the last step, if `find_unused_parameters` is set."""
        return frozenset() if self._reducer is None else self._reducer.unused

    def _set_local(self, local: bool) -> None:
        super()._set_local(local)
        if self._reducer is not None and self.accumulate == "sharded":
            self._reducer.local = False  # so that every backward is synchronized

    def _settings(self) -> dict[str, object]:
        return {
            **super()._settings(),
            "stage": self.stage,
            "bucket_size_mb": self.bucket_size_mb,
            "accumulate": self.accumulate,
            "reshard_after_forward": self.reshard_after_forward,
            "compute_dtype": self.compute_dtype,
            "units": names_of(self.module, self._asked_units),
        }


def _weakly(wrapper: Sharded) -> Callable[[bool], None]:
    """Return a function that notifies a wrapper of waits, and holds only a weak reference to the wrapper."""
    me = weakref.WeakMethod(wrapper._notify_wait)

    def notify(waits: bool) -> None:
        if (alive := me()) is not None:
            alive(waits)

    return notify


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in a value, which may be nested in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        cast = [cast_floats(each, dtype) for each in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    if isinstance(value, dict):
        return type(value)({key: cast_floats(each, dtype) for key, each in value.items()})
    return value


def _refuse_complex(named: Named) -> None:
    for name, each in named:
        if each.is_complex():
            raise ValueError(
                f"{name} is {each.dtype}, but shards must be real; use its torch.view_as_real() as the parameter"
            )
