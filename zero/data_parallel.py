"""ZeRO for any module: gradients are scattered instead of all-reduced, and parameters gathered instead of kept.

    stage   a rank keeps                      sends, as multiples of (n - 1) / n x the model
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

from muster.ddp.buckets import require_size
from muster.ddp.gradients import Named, deal
from muster.ddp.malloc import keep_freed_memory
from muster.ddp.reduced import Reduced
from muster.ddp.reducer import Reducer
from muster.zero.flat import FlatParameters, by_kind
from muster.zero.gather import Gather, NeighbourGather, gather_for
from muster.zero.gradients import Gradients, KeptGradients, PassingGradients
from muster.zero.neighbours import neighbours_of
from muster.zero.scatter import UNDER_WAY, NeighbourScatter, Scatter, scatter_for
from muster.zero.sharded import Sharded
from muster.zero.units import ROOT, Unit, Units, names_of, units_of
from muster.zero.whole import AlwaysWhole, Presence, in_backward
from muster.zero.windows import Window, Windows

Stage = Literal[1, 2, 3]
Accumulate = Literal["local", "sharded"]
STAGES: Final = (1, 2, 3)


class ShardedDataParallel(Sharded, Reduced):
    """Wrap a module so that optimizer state (stage 1), gradients (2) and parameters (3) are sharded.

    Building one is a collective: parameters and buffers are broadcast from the group's rank 0. Parameters become
    row-major views of flat tensors, so move and cast the module before.

    `units` are modules, or tuples of modules that run one after the other, whose parameters are gathered (and in stage
    3 freed) together. All other parameters form the root unit, which is gathered first and kept through the step. By
    default, the units in stage 3 are the module's children, with lists and sequences replaced by their children; in
    stages 1 and 2 all parameters are waited for before the forward. Only a unit's own modules may use its parameters,
    and only while they run. In stage 3, all ranks must run the same units in one order, because each gather is a
    collective. On CPUs this is checked before a step.

    With `accumulate` "local", whole gradients add up on each rank while in `no_sync()`. With "sharded", every backward
    is synchronized, and no rank ever holds more than two buckets of whole gradients (stages 2 and 3).

    After a synchronization no parameter has a `.grad`. The optimizer has this rank's shard of the mean; call its
    `clip_grad_norm_`, because PyTorch's raises. `full_gradients()` returns whole gradients.

    Raises:
        ValueError: As `DataParallel`; if a stage, unit or setting is invalid; or if a parameter shares memory with
            another, with a buffer, or with an attribute of a module.
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
    ) -> None:
        if stage not in STAGES:
            raise ValueError(f"stage must be 1, 2 or 3, got {stage!r}")
        if accumulate not in ("local", "sharded"):
            raise ValueError(f"accumulate must be 'local' or 'sharded', got {accumulate!r}")
        if exact and accumulate == "sharded":
            raise ValueError(
                "exact sums accumulate micro-batches on each rank first; drop accumulate='sharded' or exact"
            )
        require_size(bucket_size_mb)
        self.stage = stage
        self.accumulate = accumulate
        self.bucket_size_mb = bucket_size_mb
        self.reshard_after_forward = reshard_after_forward
        self._asked_units = None if units is None else list(units)  # a ModuleList would become a submodule
        super().__init__(
            module,
            process_group,
            exact=exact,
            find_unused_parameters=find_unused_parameters,
            communication_dtype=communication_dtype,
        )

    def _prepare(self) -> None:
        _refuse_complex(self.trainable())
        rank = dist.get_rank(self.process_group)
        named = list(self.module.named_parameters())
        # If 16-bit parameters keep only masters, other ranks cannot read the parameters from shared memory.
        rounds = self.stage == 3 and any(each.itemsize == 2 for _, each in named)
        self.neighbours = None if rounds else neighbours_of(self.process_group, self.device)
        gather = gather_for(self.process_group, self.device, self.neighbours)
        if self.stage < 3:
            everything = [Unit(ROOT, (), tuple(named))]
            units = everything if self._asked_units is None else units_of(self.module, self._asked_units)
            self.homes = [FlatParameters(part, rank=rank, ranks=self.ranks) for part in self._buckets_of(named)]
            self._settle(gather)
            self.presence: Presence = AlwaysWhole(self.module, units, self.homes, gather, self.weakly())
        else:
            units = units_of(self.module, self._asked_units)
            of_units = [
                [FlatParameters(part, rank=rank, ranks=self.ranks) for part in by_kind(unit.parameters)]
                for unit in units
            ]
            self.homes = [home for homes in of_units for home in homes]
            keep_freed_memory()  # the memory of units is allocated and freed all the time
            for home in self.homes:
                home.split()
            self._settle(gather)
            windows = [Window(unit, homes, gather, self.weakly()) for unit, homes in zip(units, of_units, strict=True)]
            self.presence = Windows(self.module, windows, gather, reshard=self.reshard_after_forward)
        self.units = [unit.name for unit in units]
        self.gather = gather
        self.scatter = self._scatter()
        self.scatter.waiting = _weakly(self)
        self._reducer = self._build()
        if isinstance(self.presence, Windows) and self._reducer is not None:
            self.presence.launch_with(self._reducer)
        weakref.finalize(self, self.presence.remove).atexit = False

    def _settle(self, gather: Gather) -> None:
        """Move tensors that other ranks read into shared memory: parts of the flat tensors, or the shards."""
        self._flats: dict[int, list[Tensor]] = {}
        if self.neighbours is None:
            return
        assert isinstance(gather, NeighbourGather)
        rank = dist.get_rank(self.process_group)
        lengths = [len(home.shard) if home.is_split else home.layout.length for home in self.homes]
        shared = self.neighbours.share([(each, home.dtype) for each, home in zip(lengths, self.homes, strict=True)])
        for home, tensors in zip(self.homes, shared, strict=True):
            if home.is_split:
                home.settle_shard(tensors[rank])
                gather.know(home, tensors)
            else:
                home.settle(tensors[rank])
                gather.know(home, [home.parts(whole)[each] for each, whole in enumerate(tensors)])
        if self.stage == 1 and not self.exact and self.communication_dtype is None:
            learning = [home for home in self.homes if home.trains]
            gradients = self.neighbours.share([(home.layout.length, home.dtype) for home in learning])
            self._flats = {id(home): tensors for home, tensors in zip(learning, gradients, strict=True)}

    def _scatter(self) -> Scatter:
        if self._flats:
            assert self.neighbours is not None
            return NeighbourScatter(self.process_group, self.neighbours, self._flats)
        at_most = None if self.stage == 1 else UNDER_WAY
        within_host = self.neighbours is not None and self.stage == 3
        return scatter_for(self.process_group, self.device, exact=self.exact, at_most=at_most, within_host=within_host)

    def _buckets_of(self, named: Named) -> list[Named]:
        """Group parameters into flat tensors as gradients are grouped into buckets. Frozen ones are separate."""
        frozen = [(name, each) for name, each in named if not each.requires_grad]
        return [*deal(self.trainable(), self.bucket_size_mb), *by_kind(frozen)]

    def _build(self) -> Reducer[Gradients] | None:
        """Hook the gradients. Buckets of the last units are launched first, the root unit's last."""
        homes = [home for home in self.homes if home.trains]
        if self.stage == 3:
            root = {id(home) for home in self._root_homes()}
            homes = [home for home in homes[::-1] if id(home) not in root] + [h for h in homes if id(h) in root]
        if not homes:
            return None
        named = [pair for home in homes for pair in home.named]
        buckets = [self._gradients(number, home) for number, home in enumerate(homes)]
        return Reducer(named, buckets, self.scatter, find_unused=self.find_unused_parameters)

    def _gradients(self, number: int, home: FlatParameters) -> Gradients:
        message = None if self.communication_dtype == home.dtype else self.communication_dtype
        if self.stage == 1:
            flats = self._flats.get(id(home))
            return KeptGradients(number, home, message, flat=None if flats is None else flats[home.rank])
        return PassingGradients(number, home, message, held=home not in self._root_homes() and self.stage == 3)

    def _let_go(self) -> None:
        super()._let_go()
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None

    def _root_homes(self) -> Sequence[FlatParameters]:
        return self.presence.root.homes if isinstance(self.presence, Windows) else ()

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module. After a forward with gradients, the backward will be synchronized."""
        if torch.is_grad_enabled() and not in_backward():
            self._keep_up()
            for home in self.homes:
                if home.grad is not None:
                    home.unsend()
            if self._reducer is not None:
                self._reducer.forward_begins()
        with self.presence.forward():
            return self.module(*inputs, **keywords)

    @property
    def unused(self) -> frozenset[str]:
        """Names of the parameters that no rank used in the last step, if `find_unused_parameters` is set."""
        return frozenset() if self._reducer is None else self._reducer.unused

    def _set_local(self, local: bool) -> None:
        super()._set_local(local)
        if self._reducer is not None and self.accumulate == "sharded":
            self._reducer.local = False  # synchronizes every backward

    def _settings(self) -> dict[str, object]:
        return {
            **super()._settings(),
            "stage": self.stage,
            "bucket_size_mb": self.bucket_size_mb,
            "accumulate": self.accumulate,
            "reshard_after_forward": self.reshard_after_forward,
            "units": names_of(self.module, self._asked_units),
        }


def _weakly(wrapper: Sharded) -> Callable[[bool], None]:
    """Return a function that notifies a wrapper of waits through a weak reference."""
    me = weakref.WeakMethod(wrapper._tell)

    def tell(waits: bool) -> None:
        if (alive := me()) is not None:
            alive(waits)

    return tell


def _refuse_complex(named: Named) -> None:
    for name, each in named:
        if each.is_complex():
            raise ValueError(
                f"{name} is {each.dtype}, but shards are real numbers; make torch.view_as_real() of it the parameter"
            )
