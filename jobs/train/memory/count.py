"""Count a user's model on PyTorch's meta device: parameters, buffers, operations, activations kept for the backward.

The user's function is called as on a rank, but its tensors have no memory (`followed.py`). If it cannot build the model
like this, because it reads values, it is called again and builds on the CPU. If the forward cannot run without values,
the activations are unknown; everything else is counted.
"""

import io
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils.flop_counter import FlopCounterMode

from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.data import Data, open_data
from muster.jobs.train.data.loading import move_inputs
from muster.jobs.train.memory.followed import ForwardHooks, Passed, Roles, follow, key_of
from muster.jobs.train.models import model_of
from muster.jobs.train.models.made import layers_of, loss_of
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.models.tensor_plan import plan_of
from muster.jobs.train.models.units import units_of
from muster.jobs.train.numerics.numerics import numerics_of
from muster.jobs.train.numerics.optim import made_optimizer
from muster.jobs.user import code
from muster.pipe.boundaries import weights_of
from muster.pipe.tensor.plan import Column, Heads, Row, Vocabulary, matches

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

FEW: Final = 2  # number of samples; batch norm needs two
MANY: Final = 4
CPU: Final = torch.device("cpu")
KEY: Final = "train.model.make"
SIDE: Final = 8  # side length of a square test parameter, which a user's optimizer updates once


def count(settings: "TrainSettings") -> dict[str, Any]:
    """Return the record of a job: {"model": null or the input of `jobs/models/counted.py`, "state_bytes": null or n}.

    `state_bytes` is the state of a user's optimizer per element of a float32 parameter.

    Raises:
        RefusedError: if the user's code fails.
    """
    optimizer = settings.optimizer
    model = _Count(settings).record() if settings.model.make is not None else None
    return {"model": model, "state_bytes": None if optimizer.make is None else _state_bytes(settings)}


def size_of_made(settings: "TrainSettings") -> dict[str, Any]:
    """Return {"parameters": n, "flops": [forward, forward and backward] of a sample, "context": tokens or null}.

    Only matrix products and convolutions are counted. The operations are 0 if the forward cannot be traced.

    Raises:
        RefusedError: if the user's code fails, or the data is missing.
    """
    counting, flops = _Count(settings), [0, 0]
    with suppress(Exception), FlopCounterMode(display=False) as counter:  # raises if a forward reads a tensor's values
        loss = counting.forward(FEW)
        forward = counter.get_total_flops()
        torch.autograd.backward(loss)
        flops = [forward // FEW, counter.get_total_flops() // FEW]
    data, elements = counting.data, sum(each.numel() for each in counting.model.parameters())
    context = data.units_per_sample if data.unit == "tokens" else None
    return {"parameters": elements, "flops": flops, "context": context}


def _state_bytes(settings: "TrainSettings") -> int:
    """Update one small parameter; return the bytes per element of all state tensors with the parameter's shape."""
    text, args = settings.optimizer.make, {"lr": settings.optimizer.lr, **settings.optimizer.args}
    assert text is not None
    parameter = nn.Parameter(torch.ones(SIDE, SIDE))
    parameter.grad = torch.ones(SIDE, SIDE)

    def step() -> torch.optim.Optimizer:
        optimizer = made_optimizer(text)([{"params": [parameter]}], **args)
        optimizer.step()
        return optimizer

    state = code.called("train.optimizer.make", text, step).state[parameter]
    return sum(each.itemsize for each in state.values() if isinstance(each, Tensor) and each.shape == parameter.shape)


def _why(error: Exception) -> str:
    """Describe in one line why a forward could not be traced."""
    if isinstance(error, RefusedError):
        return str(error)
    if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"the forward raised {code.spelt(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((each for each in reversed(frames) if Path(each.filename).is_relative_to(Path.cwd())), frames[0])
    return f"the forward reads values, which are not computed here: {last.filename}, line {last.lineno}"


class _Count:
    """The counts of one user's model."""

    def __init__(self, settings: "TrainSettings") -> None:
        self.settings = settings
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.numerics = replace(numerics_of(settings, CPU), compile=False, recompute=False)
        self.no_activations, self.no_layers, self.no_plan = "", "", "the job has no model.plan"
        self.model = self._built()
        self.layers = self._layers()
        self.cuts, self.roles = self._planned()
        own = [*self.model.parameters(), *self.model.buffers()]
        # If the model was built on the CPU, the list also has the fake tensor that represents each of its tensors.
        self.own = own + [self.fake.from_tensor(each) for each in own if not isinstance(each, FakeTensor)]
        # For a parameter owned by several modules, `named_parameters` yields the first name.
        self.first_names = {id(each): name for name, each in self.model.named_parameters()}

    def record(self) -> dict[str, Any]:
        """Return all counts of the model, with the reasons for missing ones."""
        try:
            passed = follow(self._follower, self.forward, FEW, MANY)
        except Exception as error:  # from the user's code or data, or an operator that needs values
            self.no_activations = _why(error)
            passed = [Passed(name, "", is_last=True) for name, _ in [*self.model.named_modules()][::-1]]
        rows = self._rows(passed)
        if self.layers is not None:
            self._weigh(self.layers, rows)
        return {
            "name": self.settings.model.title,
            "parts": rows,
            "no_activations": self.no_activations,
            "no_layers": self.no_layers,
            "no_plan": self.no_plan,
        }

    def _built(self) -> nn.Module:
        """Build the model, without memory for its values if the user's function allows that."""
        text, vocabulary = self.settings.model.make, 0
        if text is None:
            vocabulary = self.data.vocabulary
        else:
            code.load(KEY, text, Path.cwd())  # imported outside of fake mode, so that global tensors have values
        loss_of(self.settings)
        try:
            with self.fake, redirect_stderr(io.StringIO()):
                return self.numerics.place(model_of(self.settings, vocabulary=vocabulary))
        except Exception:  # the function may need a tensor's values; building on the CPU repeats any other error
            return self.numerics.place(model_of(self.settings, vocabulary=vocabulary))

    def _layers(self) -> LayerStack | None:
        try:
            with self.fake:
                return layers_of(self.model, self.settings)
        except RefusedError as error:
            self.no_layers = str(error).removeprefix(f"{KEY}: ").partition(";")[0]
            return None

    def _planned(self) -> tuple[dict[str, int], Roles]:
        """Return the split dimension of each parameter that tensor ranks split, and the roles of modules."""
        cuts, columns, rows = dict[str, int](), set[str](), set[str]()
        if self.settings.model.plan is None:
            return cuts, Roles()
        self.no_plan = ""
        for pattern, rule in plan_of(self.model, self.settings).items():
            for name, module in self.model.named_modules():
                if not matches(pattern, name):
                    continue
                if problems := [*rule.problems(module, 1)]:
                    self.no_plan = f"{name} {problems[0]}"
                    return {}, Roles()
                cuts |= {f"{name}.{own}": dimension for own, dimension in rule.cuts(module)}
                rows |= {name} if isinstance(rule, Row) else set()
                columns |= {f"{name}.{own}" for own in rule.columns} if isinstance(rule, Heads) else set()
                is_column = isinstance(rule, Column) or (isinstance(rule, Vocabulary) and isinstance(module, nn.Linear))
                columns |= {name} if is_column else set()
        return cuts, Roles(columns, rows)

    def _follower(self) -> ForwardHooks:
        names = {} if self.layers is None else {module: name for name, module in self.layers.named_modules()}
        names |= {module: name for name, module in self.model.named_modules()}
        names[self._runs] = ""
        layers = [] if self.layers is None else [name for name, _ in self.layers.named_children()]
        return ForwardHooks(names, layers, self.roles, set(map(key_of, self.own)))

    @property
    def _runs(self) -> nn.Module:
        return self.model if self.layers is None else self.layers

    def forward(self, samples: int) -> Tensor:
        """Compute the loss of a batch; its autograd graph keeps the same tensors as in a training step."""
        inputs, targets = self._batch(samples)
        self._runs.train()
        with self.fake:
            return self.numerics.loss(self._runs, self.fake.from_tensor(inputs), self.fake.from_tensor(targets))

    def _batch(self, samples: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.data.train_batch(torch.zeros(samples, dtype=torch.long), 0)
        return move_inputs(inputs, CPU, self.numerics.inputs), targets

    @cached_property
    def data(self) -> Data:
        """The job's data; its first sample determines shapes and dtypes."""
        return open_data(self.settings)

    def _rows(self, passed: list[Passed]) -> list[dict[str, Any]]:
        """Return the parts as records. A tensor belongs to the part of its module or of the nearest parent that ran."""
        names = {module: name for name, module in self.model.named_modules()}
        units = {
            names[module]: names[unit]
            for unit, *_ in units_of(self.model, self.settings.model)
            for module in unit.modules()
        }
        rows = [self._row(each, units) for each in passed]
        last = {each.name: row for each, row in zip(passed, rows, strict=True) if each.is_last}
        for name, module in self.model.named_modules():
            at = name
            while at not in last:
                at = at.rpartition(".")[0]
            for parameter in module.parameters(recurse=False):
                first = self.first_names[id(parameter)]
                kind = "tensors" if first.rpartition(".")[0] == name else "shared"
                last[at][kind].append(self._tensor(first, parameter))
            last[at]["buffer_bytes"] += sum(each.nbytes for each in module.buffers(recurse=False))
        return rows

    def _row(self, part: Passed, units: Mapping[str, str]) -> dict[str, Any]:
        flags = {key: getattr(part, key) for key in ("keeps_input", "splits_kept", "splits_outputs")}
        return {
            "layer": part.layer,
            "name": part.name,
            "unit": units.get(part.name, ""),
            "tensors": [],
            "shared": [],
            "flops": 0,
            "outputs": part.outputs,
            "saved_bytes": None if self.no_activations else part.kept,
            "buffer_bytes": 0,
            **flags,
        }

    def _tensor(self, name: str, parameter: Tensor) -> dict[str, Any]:
        shape, trained = list(parameter.shape), parameter.requires_grad
        return {"name": name, "shape": shape, "trained": trained, "cut": self.cuts.get(name)}

    def _weigh(self, layers: LayerStack, rows: list[dict[str, Any]]) -> None:
        """Write the operations of each layer, forward and backward, to the row of its last part."""
        try:
            inputs, _ = self._batch(FEW)
            work = weights_of(layers, "flops", inputs.shape)
        except (RefusedError, ValueError) as error:
            self.no_layers = str(error)
            return
        ends = {row["layer"]: row for row in rows}
        for (name, _), flops in zip(layers.named_children(), work, strict=True):
            ends[name]["flops"] = round(flops / FEW)
