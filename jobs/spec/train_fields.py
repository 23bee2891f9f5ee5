"""The keys of a `train:` section, typed: model, data, parallelism, numerics, and length of training."""

from collections.abc import Collection
from itertools import chain
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import Self

from muster.jobs.basics.words import unknown
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.spec.modes import MODES
from muster.jobs.spec.profile import OFF, ProfileSettings
from muster.jobs.spec.rules import ModelRules
from muster.jobs.spec.split import ParallelSettings
from muster.jobs.spec.strict import NonNegative, Positive, Seed, Strict
from muster.jobs.user.code import FORM, split

DATA_NAMES: Final = ("digits", "cifar10", "python-source", "synthetic")

Precision = Literal["fp32", "fp64", "bf16", "fp16", "pure_bf16"]


def one_of(what: str, *tables: Collection[str]) -> AfterValidator:
    """Return a check that a text is a name in one of the tables; the tables are read at the time of the check."""

    def check(name: str) -> str:
        if not any(name in table for table in tables):
            raise ValueError(unknown(what, name, tuple(chain(*tables))))
        return name

    return AfterValidator(check)


def _is_made(text: str) -> str:
    split(text)
    return text


Made = Annotated[str, AfterValidator(_is_made)]


def _only_with(section: Strict, given: str, allowed: Collection[str], what: str) -> None:
    """Refuse keys that must not be combined with `make`."""
    if foreign := sorted(section.model_fields_set - {given, *allowed}):
        raise ValueError(f"{what} made by {given} has no {' or '.join(foreign)} here; pass it in args")


class ModelSettings(ModelRules, Strict):
    """A model: a row of `jobs/models/shapes.py` with overrides, a GPT given by its sizes, or a function's result."""

    name: Annotated[str, one_of("model", VGG_SHAPES, GPT_SHAPES)] | None = None
    make: Made | None = Field(None, description=f"a function that returns an nn.Module: {FORM}")
    args: dict[str, Any] = Field({}, description="for make: keyword arguments")
    units: list[str] | None = Field(
        None,
        description="for make: modules by name, with * and ?, that zero3, fsdp, compile and activation_checkpointing "
        "handle one by one; default: repeated children",
        min_length=1,
    )
    plan: Made | None = Field(
        None, description="for make: a function that takes the model and returns its plan for tensor parallel"
    )
    d_model: Positive | None = None
    d_ff: Positive | None = None
    layers: Positive | None = None
    heads: Positive | None = None
    context: Positive | None = None
    vocabulary: Positive | None = None
    tied: bool = True
    bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.make is not None:
            _only_with(self, "make", ("args", "units", "plan", "context", "vocabulary"), "a model")
            return self
        if foreign := sorted({"args", "units", "plan"} & self.model_fields_set):
            raise ValueError(f"{foreign[0]} is only for a model from make; add make: {FORM}, or remove {foreign[0]}")
        sizes = {"d_model": self.d_model, "d_ff": self.d_ff, "layers": self.layers, "heads": self.heads}
        given = [key for key, value in sizes.items() if value is not None]
        if self.name is None and len(given) < len(sizes):
            missing = ", ".join(key for key in sizes if key not in given)
            raise ValueError(f"a model needs a name or all four sizes; missing: {missing}")
        if self.name is not None and given:
            raise ValueError(f"a named model has its sizes already; remove name or {', '.join(given)}")
        return self


class DataSettings(Strict):
    """A data set: a name in `DATA_NAMES`, a text file (`{text: PATH}`), or the result of a function."""

    name: Annotated[str, one_of("data", DATA_NAMES)] | None = None
    text: str | None = None
    make: Made | None = Field(None, description=f"a function that returns (train, eval), map-style Datasets: {FORM}")
    args: dict[str, Any] = Field({}, description="for make: keyword arguments")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(each is not None for each in (self.name, self.text, self.make)) != 1:
            raise ValueError("data is a name, {text: PATH} or {make: FILE.py:NAME}; give exactly one of them")
        if self.make is None and "args" in self.model_fields_set:
            raise ValueError("args is only for data from make; remove it")
        return self

    @property
    def title(self) -> str:
        """The name of the data in messages."""
        return self.make or self.name or "text"


class OptimizerSettings(Strict):
    """The optimizer. `betas` and `eps` are for adamw, `momentum` and `nesterov` for sgd, `args` for the user's own."""

    name: Literal["sgd", "adamw"] = "sgd"
    make: Made | None = Field(None, description=f"an optimizer class, called with parameters, lr and args: {FORM}")
    args: dict[str, Any] = Field({}, description="for make: keyword arguments besides lr")
    lr: Annotated[float, Field(gt=0.0)] = 0.01
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    nesterov: bool = False
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8

    @model_validator(mode="after")
    def _fits_its_name(self) -> Self:
        if self.make is not None:
            _only_with(self, "make", ("lr", "args"), "an optimizer")
            return self
        foreign = {"sgd": {"betas", "eps", "args"}, "adamw": {"momentum", "nesterov", "args"}}[self.name]
        if wrong := sorted(foreign & self.model_fields_set):
            raise ValueError(f"{self.name} has no {' or '.join(wrong)}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs a momentum; add momentum: 0.9, or remove nesterov")
        return self


class ScheduleSettings(Strict):
    """The learning rate over steps: a linear warm-up, then constant or a decay from lr to lr * final."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    final: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0


class TrainFields(Strict):
    """The keys of `train:`, each validated separately; `jobs/spec/train.py` checks them against each other."""

    model: ModelSettings
    data: DataSettings
    loss: Made | None = Field(
        None,
        description="a function that returns the mean loss of outputs and targets; default: cross-entropy of logits",
    )
    mode: Annotated[str, one_of("mode", MODES)] = "ddp"
    parallel: ParallelSettings | None = None
    batch_size: Positive = Field(64, description="samples per step over all ranks")
    epochs: Positive | None = None
    steps: Positive | None = None
    log_every: Positive = 20
    seed: Seed = 0
    deterministic: bool = False
    exact: bool = Field(False, description="the same bits on any number of ranks that divides virtual_ranks")
    virtual_ranks: Positive | None = None
    grad_accumulation: Positive = Field(1, description="micro-batches per step; pipelines use microbatches instead")
    microbatches: Positive | None = Field(
        None, description="for pipelines except model (always 1): parts of a batch; default: 4 per rank"
    )
    chunks: Annotated[int, Field(ge=2)] = Field(2, description="for mode interleaved: slices of the model per rank")
    cut: Literal["count", "parameters", "flops", "profile"] | list[NonNegative | str] = Field(
        "flops",
        description="for pipelines: the quantity that stages balance, or their first layers by name or number: "
        "[block3, norm]",
    )
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None
    non_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="what to do after a step with a non-finite loss or gradient, which is discarded; skip: continue",
    )
    precision: Precision = Field(
        "fp32",
        description="bf16, fp16: autocast, fp16 with loss scaling; pure_bf16: also the weights, with fp32 "
        "master weights",
    )
    compile: bool = Field(False, description="torch.compile, block by block")
    activation_checkpointing: bool = Field(False, description="recompute every block in the backward, to save memory")
    cuda_graph: bool = Field(
        False,
        description="record steps (in a pipeline: each forward and backward) as CUDA graphs and replay them; for GPUs "
        "that wait for the host",
    )
    bucket_size_mb: Annotated[float, Field(gt=0.0)] | None = Field(
        25.0, description="upper limit, for modes bucketed, zero1 and zero2; null: all gradients in one bucket"
    )
    accumulate: Literal["local", "sharded"] = Field(
        "local",
        description="for modes zero1, zero2, zero3 and fsdp: where micro-batches accumulate; local: in full gradients, "
        "which are sharded once per step; sharded: in each rank's shard, after every micro-batch, for less memory and "
        "more communication; other modes refuse it",
    )
    reshard_after_forward: bool = Field(
        True,
        description="for modes zero3 and fsdp: free gathered parameters after the forward, and gather them again "
        "in the backward; other modes refuse it",
    )
    layerwise: bool = Field(
        False,
        description="for mode zero3 and pipelines, to study: gradients are computed with one torch.autograd.grad per "
        "layer, and zero3 also gathers parameters layer by layer; other modes refuse it",
    )
    sequence_parallel: bool = Field(
        False,
        description="for split layers: each rank computes norms and dropout between them for a part of the tokens, "
        "to save memory; other modes refuse it",
    )
    communication_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="dtype of gradients on the network; default: their own. Only for modes with Muster's wrappers"
    )
    profile: ProfileSettings = Field(
        OFF, description="record traces, operators, flame graph and overlap for some steps of every rank"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluate: bool | Literal["all"] = Field(
        True,
        description="measure the model on held-out samples after every epoch and at the end: all images, or 1024 "
        "windows spread over the last tenth of a text; all: that whole tenth",
    )
    augment: bool | None = Field(None, description="crop and flip; default: only for cifar10")
    loader_workers: NonNegative = Field(0, description="processes that load batches ahead; 0: in the rank itself")

    @model_validator(mode="before")
    @classmethod
    def _mode_may_be_null(cls, given: Any) -> Any:
        """Let `--set train.mode=null` remove the mode of a file in favour of `parallel:`."""
        is_null = isinstance(given, dict) and given.get("mode", "") is None
        return {key: value for key, value in given.items() if key != "mode"} if is_null else given

    @field_validator("model", "data", mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
