"""Pipelines within one process: an `nn.Sequential` over several devices, with one thread per stage.

    model = Pipe(nn.Sequential(...), chunks=4, devices=["cuda:0", "cuda:1"])
    loss = cross_entropy(model(inputs), targets.to("cuda:1"))           the result is on the last device
    loss.backward()                                                     through autograd, as usual

The batch is cut into micro-batches, which follow each other through the stages: in tick t, stage s runs micro-batch
t - s.

    tick       0    1    2    3    4            3 stages, 3 micro-batches, 3 + 3 - 1 ticks
    stage 0    0    1    2
    stage 1         0    1    2
    stage 2              0    1    2

This is GPipe's forward (Huang et al. 2019). The backward is autograd's own, which has a thread for each GPU. So stages
on GPUs also overlap in the backward, last micro-batch first; all stages on CPUs share one thread. The activations of
every micro-batch are kept until the backward, unless `recompute` is set. For pipelines over processes, with other
schedules, see `pipe.Pipeline`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from muster.pipe.buffers import Buffers
from muster.pipe.local.across import Ready
from muster.pipe.local.nested import batch_of, cut, join
from muster.pipe.local.recomputing import RECOMPUTE, Recompute, is_recomputed
from muster.pipe.local.turns import Turns
from muster.pipe.local.workers import Modes, PipeCall, StageResult, StageTask, Workers
from muster.pipe.run import part_lengths
from muster.pipe.schedules.cuts import Cuts, by_hand, even


def clock_cycles(microbatches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the (micro-batch, stage) pairs of every tick: stage s runs micro-batch t - s.

    The pairs of one tick may run concurrently, and need only results of earlier ticks. There are
    microbatches + stages - 1 ticks.
    """
    for tick in range(microbatches + stages - 1):
        first, last = max(0, tick - microbatches + 1), min(tick, stages - 1)
        yield [(tick - stage, stage) for stage in range(first, last + 1)]


def split_module(module: nn.Sequential, cuts: Sequence[int] | None = None) -> list[nn.Sequential]:
    """Cut a sequence into stages of consecutive layers, which keep their names.

    `cuts` lists the first layer of each stage. Without it, the sequence is cut where the device of its layers changes.
    A layer without parameters and buffers belongs to the device of the layer before it. If the sequence begins with
    such layers, they belong to the device of the first layer that has parameters or buffers.

    Raises:
        ValueError: If a layer is on several devices, or the cuts are invalid.
    """
    named = list(module._modules.items())  # named_children() would skip a layer that occurs twice
    found = _cuts_by_device(module) if cuts is None else by_hand(cuts, len(named), len({0, *cuts}))
    stages = [nn.Sequential() for _ in found]
    for stage, (start, end) in zip(stages, pairwise((*found, len(named))), strict=True):
        stage._modules.update(named[start:end])
        stage.training = module.training
    return stages


class Pipe(nn.Module):
    """Run an `nn.Sequential` as a pipeline over the devices of this process.

    Each entry of `devices` gets one stage and one thread; a device may occur more than once. Stages are cut evenly by
    layer count, at `cuts` (the first layers of the stages), or by `balance` (the number of layers of each). Layers are
    moved to their devices. Without `devices` the layers stay where they are, and are cut where their devices change.

    A batch is cut into `chunks` micro-batches whose lengths differ by at most one, or into micro-batches of
    `split_size` samples, the last of which may be shorter. A batch with fewer samples than `chunks` is cut into fewer
    micro-batches. Inputs, outputs and values between layers may be tuples, lists and dictionaries of tensors. Every
    input tensor is cut along its first dimension, and every output tensor joined along it.

    With `recompute`, the activations inside stages are not kept: the backward runs a stage's forward again, for every
    micro-batch ("always"), or for all but the last ("except_last"), whose backward begins at once. This second forward
    uses the random numbers, autocast settings and buffer values of the first one.

    A pipe differs from its module as follows. Batch norms normalize each micro-batch, and update their statistics after
    it. Dropout draws a mask for each micro-batch. Random numbers are drawn in the order of ticks, and within a tick in
    the order of stages. Stages that share a generator (all on CPUs, or all on one GPU) take turns (`turns.py`), so the
    same seed gives the same masks. Gradients equal those of one forward per micro-batch and one backward through all of
    them. Threads inherit the caller's autograd modes, autocast, default device, current streams and context variables,
    but not its torch function and dispatch modes or saved-tensor hooks. Use within `torch.func` or tracing raises an
    error. Compile the layers, not the pipe. Layers are called one by one, without the sequence's own forward and hooks.
    Micro-batches are views of the batch, so no layer may write to the batch if autograd needs the layer's input.

    If a stage raises, the forward raises the same error at once. Other stages finish their current work and start
    nothing more; their results are dropped. Then the pipe can be used again. Several threads may use a pipe
    concurrently. The threads of a pipe start with its first forward and end when the pipe is deleted. A copy of the
    pipe starts its own threads. `state_dict` has the module's names, prefixed by `module.`.

    Raises:
        TypeError: If the module is not an `nn.Sequential`.
        ValueError: If there are more devices than layers, a setting is invalid, or devices share a parameter or buffer.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int | None = None,
        *,
        split_size: int | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
        cuts: Sequence[int] | None = None,
        balance: Sequence[int] | None = None,
        recompute: Recompute = "never",
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError(
                f"module: got a {type(module).__name__}; expected an nn.Sequential, whose layers become stages"
            )
        if not len(module):
            raise ValueError("module has no layers; expected at least one")
        self.chunks, self.split_size = _count(chunks, "chunks"), _count(split_size, "split_size")
        if (chunks is None) == (split_size is None):
            raise ValueError(
                f"chunks is {chunks} and split_size {split_size}; pass exactly one of them, to cut batches"
            )
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be 'always', 'except_last' or 'never', got {recompute!r}")
        self.recompute = recompute
        self.module = module
        self.cuts, self.devices = _placed(module, devices, cuts, balance)
        self._check_shared()
        self._place()
        self._workers = Workers(self.devices)
        self._turns = Turns(self.devices)

    @property
    def stages(self) -> list[nn.Sequential]:
        """The current stages of the module, including layers that were replaced after the pipe was built."""
        return split_module(self.module, self.cuts)

    def __len__(self) -> int:
        return len(self.module)

    def forward(self, value: Any) -> Any:
        """Run a batch through all stages; return the whole output, on the last device.

        Raises:
            ValueError: If the inputs have no batch dimension, or outputs of micro-batches cannot be joined.
            RuntimeError: If called within a transform of torch.func, or while being traced.
        """
        call = PipeCall(Modes.of_this_thread(value, self.devices))
        values = cut(value, self._lengths(batch_of(value)))
        ready: list[Ready] = [{}] * len(values)
        stages, inboxes = self.stages, self._workers.inboxes()
        keys = self._turns.keys(stages)
        buffers = [Buffers(list(stage._modules.items())) for stage in stages]
        answer: StageResult | None = None
        del value
        try:
            for tick in clock_cycles(len(values), len(stages)):
                microbatch_of = {stage: microbatch for microbatch, stage in tick}
                for wave in self._turns.waves(keys, microbatch_of):
                    for stage in wave:
                        microbatch = microbatch_of[stage]
                        again = is_recomputed(self.recompute, microbatch, len(values))
                        task = StageTask(
                            *(call, stage, microbatch, stages[stage], values[microbatch], ready[microbatch]),
                            buffers=buffers[stage] if again else None,
                        )
                        inboxes[stage].put(task)
                        del task  # drop this reference, so that the worker holds the only one
                    for _ in wave:
                        answer = call.answers.get()
                        if answer.error is not None:
                            raise self._with_note(answer.error, answer.stage, answer.microbatch, len(values))
                        values[answer.microbatch], ready[answer.microbatch] = answer.value, answer.ready
        finally:
            answer = None  # an error in a reference cycle would keep its stage's tensors alive
        return join(values)

    def close(self) -> None:
        """End the threads and wait for them. Another forward starts new threads."""
        self._workers.close()

    def _lengths(self, samples: int) -> list[int]:
        """Return the number of samples of each micro-batch."""
        if self.split_size is not None:
            whole, rest = divmod(samples, self.split_size)
            return [self.split_size] * whole + [rest] * (rest > 0 or whole == 0)
        assert self.chunks is not None
        return part_lengths(samples, self.chunks) if samples else [0]

    def _with_note(self, error: BaseException, stage: int, microbatch: int, microbatches: int) -> BaseException:
        """Add a note with the stage to an error, if this version of Python supports notes."""
        if hasattr(error, "add_note"):
            names = list(self.stages[stage]._modules)
            error.add_note(
                f"in stage {stage} of {len(self.devices)} on {self.devices[stage]}, layers {names[0]!r} to "
                f"{names[-1]!r}, micro-batch {microbatch} of {microbatches}"
            )
        return error

    def _check_shared(self) -> None:
        homes: dict[int, tuple[torch.device, str]] = {}
        for stage, device in zip(self.stages, self.devices, strict=True):
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
                home, first = homes.setdefault(id(tensor), (device, name))
                if home != device:
                    raise ValueError(
                        f"{first} and {name} are one tensor, but their layers are on {home} and {device}; choose "
                        "cuts that put both layers into one stage or on one device"
                    )

    def _place(self) -> None:
        for stage, device in zip(self.stages, self.devices, strict=True):
            for layer in stage:
                layer.to(device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Pipe":
        """Convert the layers as `nn.Module` does, but leave each on its own device, even if the pipe is moved."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place()
        return self


def _placed(
    module: nn.Sequential,
    devices: Sequence[torch.device | str | int] | None,
    cuts: Sequence[int] | None,
    balance: Sequence[int] | None,
) -> tuple[Cuts, tuple[torch.device, ...]]:
    """Return the first layer and the device of every stage."""
    if devices is None:
        if cuts is not None or balance is not None:
            raise ValueError("cuts or balance is given without devices; pass a device for every stage")
        found = _cuts_by_device(module)
        return found, tuple(_homes(module)[start] for start in found)
    if isinstance(devices, (str, torch.device)) or not devices:
        raise ValueError(f"devices: got {devices!r}; expected a list with one device for each stage")
    named = tuple(torch.device(each) for each in devices)
    if missing := [str(each) for each in named if each.type == "cuda" and (each.index or 0) >= _gpus()]:
        raise ValueError(f"devices: {', '.join(missing)}: this process sees {_gpus()} GPUs; use those, or 'cpu'")
    indexed = tuple(
        torch.device(each.type, torch.cuda.current_device()) if each.type == "cuda" and each.index is None else each
        for each in named
    )
    if balance is not None:
        if cuts is not None:
            raise ValueError(f"cuts {list(cuts)} and balance {list(balance)}; pass only one of them")
        if sum(balance) != len(module) or min(balance, default=0) < 1 or len(balance) != len(indexed):
            raise ValueError(
                f"balance {list(balance)}: expected {len(indexed)} positive layer counts with the sum {len(module)}"
            )
        cuts = [sum(balance[:stage]) for stage in range(len(balance))]
    if cuts is None:
        return even(len(module), len(indexed)), indexed
    return by_hand(cuts, len(module), len(indexed)), indexed


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cuts_by_device(module: nn.Sequential) -> Cuts:
    homes = _homes(module)
    return tuple(layer for layer in range(len(homes)) if layer == 0 or homes[layer] != homes[layer - 1])


def _homes(module: nn.Sequential) -> list[torch.device]:
    """Return the device of every layer."""
    found: list[torch.device | None] = []
    for name, layer in module._modules.items():
        assert layer is not None
        devices = {tensor.device for tensor in (*layer.parameters(), *layer.buffers())}
        if len(devices) > 1:
            raise ValueError(f"layer {name!r} is on {sorted(map(str, devices))}; expected one device per layer")
        found.append(devices.pop() if devices else (found[-1] if found else None))
    first = next((each for each in found if each is not None), torch.device("cpu"))
    return [each or first for each in found]


def _count(number: int | None, name: str) -> int | None:
    if number is None or (isinstance(number, int) and not isinstance(number, bool) and number >= 1):
        return number
    raise ValueError(f"{name}: must be an integer of 1 or more, got {number!r}")
