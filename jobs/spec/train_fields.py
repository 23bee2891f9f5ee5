"""The keys of a `train:` section, typed: model, data, parallelism, numerics, and length of training."""

from collections.abc import Collection
from itertools import chain
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import Self

from muster.jobs.basics.words import unknown
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.spec.model_rules import ModelRules
from muster.jobs.spec.modes import MODES
from muster.jobs.spec.profile import OFF, ProfileSettings
from muster.jobs.spec.split import ParallelSettings
from muster.jobs.spec.strict import NonNegative, Positive, Seed, Strict
from muster.jobs.user.code import FORM, split

ROUNDING: Final = 1e-9  # tolerance for the rounding error of a sum of shares
REPLACED: Final = ("mode", "batch_size")  # keys that another key replaces: null removes them

DATA_NAMES: Final = ("digits", "cifar10", "python-source", "synthetic")

Precision = Literal["fp32", "fp64", "bf16", "fp16", "pure_bf16"]


def one_of(what: str, *tables: Collection[str]) -> AfterValidator:
    """Return a validator for a name in one of the tables. The validator also accepts names that are added later."""

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
        raise ValueError(f"{what} from {given} does not read {' or '.join(foreign)}; remove it, or pass it in args")


class ModelSettings(ModelRules, Strict):
    """A model: a row of `jobs/models/shapes.py` with overrides, a GPT with given sizes, or the result of a function."""

    name: Annotated[str, one_of("model", VGG_SHAPES, GPT_SHAPES)] | None = Field(
        None, description="a built-in model; `model: vgg11` is short for `model: {name: vgg11}`", examples=["gpt-nano"]
    )
    make: Made | None = Field(
        None,
        description=f"a function that returns an nn.Module: {FORM}",
        examples=["net.py:build"],
    )
    args: dict[str, Any] = Field({}, description="keyword arguments of `make`", examples=[{"width": 64}])
    units: list[str] | None = Field(
        None,
        description="with `make`: names of modules, with `*` and `?`, that zero3, fsdp, compile and "
        "activation_checkpointing handle one at a time; default: repeated children",
        min_length=1,
        examples=[["layers.*", "head"]],
    )
    plan: Made | None = Field(
        None,
        description="with `make`: a function of the model that returns its plan for tensor parallel",
        examples=["net.py:plan"],
    )
    d_model: Positive | None = Field(None, description="GPT: width of the residual stream", examples=[256])
    d_ff: Positive | None = Field(None, description="GPT: width of the MLP's hidden layer", examples=[1024])
    layers: Positive | None = Field(None, description="GPT: number of blocks", examples=[4])
    heads: Positive | None = Field(None, description="GPT: attention heads of a block", examples=[4])
    context: Positive | None = Field(
        None, description="tokens of a sample; default: that of the named model, else 128", examples=[128]
    )
    vocabulary: Positive | None = Field(
        None, description="number of tokens or classes; default: that of the data", examples=[50304]
    )
    tied: bool = Field(True, description="GPT: the embedding and the head share their weight")
    bias: bool = Field(False, description="GPT: linear layers have biases")
    norm: Literal["rms", "rms_fused", "layer"] = Field(
        "rms", description="GPT: RMSNorm, RMSNorm as one Triton kernel each way (on GPUs), or LayerNorm"
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="GPT: share of activations that dropout zeroes")

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

    name: Annotated[str, one_of("data", DATA_NAMES)] | None = Field(
        None, description="a data set; `data: digits` is short for `data: {name: digits}`", examples=["cifar10"]
    )
    text: str | None = Field(
        None, description="a text file: its bytes are the tokens, its last tenth is held out", examples=["book.txt"]
    )
    make: Made | None = Field(
        None,
        description=f"a function that returns (train, eval), map-style Datasets: {FORM}",
        examples=["data.py:sets"],
    )
    args: dict[str, Any] = Field({}, description="keyword arguments of `make`", examples=[{"folder": "/data"}])
    partition: Annotated[list[Annotated[float, Field(gt=0.0)]], Field(min_length=1)] | None = Field(
        None,
        description="images: random parts of the training samples, as shares. The first is trained on, a second one "
        "replaces the held-out samples, others are not used",
        examples=[[0.7, 0.2, 0.1]],
    )
    seed: Seed = Field(1234, description="with `partition`: seed of the random parts")

    @model_validator(mode="after")
    def _parts_are_images(self) -> Self:
        if self.partition is None:
            if "seed" in self.model_fields_set:
                raise ValueError("seed is only for partition; remove it, or add partition: [0.7, 0.2, 0.1]")
            return self
        if self.name is None or self.name == "python-source":
            raise ValueError(f"partition is for data sets of images, but data is {self.title}; remove partition")
        if sum(self.partition) > 1 + ROUNDING:
            raise ValueError(f"partition: {self.partition} adds up to more than 1; give shares of the training samples")
        return self

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(each is not None for each in (self.name, self.text, self.make)) != 1:
            raise ValueError("data must be a name, {text: PATH} or {make: FILE.py:NAME}; set exactly one of them")
        if self.make is None and "args" in self.model_fields_set:
            raise ValueError("args is only for data from make; remove it")
        return self

    @property
    def title(self) -> str:
        """The name of the data in messages."""
        return self.make or self.name or "text"


class OptimizerSettings(Strict):
    """The optimizer. `betas` and `eps` are for adamw, `momentum` and `nesterov` for sgd, `args` for `make`."""

    name: Literal["sgd", "adamw"] = Field("sgd", description="a built-in optimizer")
    make: Made | None = Field(
        None,
        description=f"an optimizer class, called with parameters, lr and args: {FORM}",
        examples=["opt.py:Lion"],
    )
    args: dict[str, Any] = Field({}, description="keyword arguments of `make` besides lr", examples=[{"beta": 0.9}])
    lr: float = Field(0.01, gt=0.0, description="learning rate, before the schedule")
    weight_decay: float = Field(0.0, ge=0.0, description="weight decay; adamw's is decoupled", examples=[0.1])
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="sgd: momentum", examples=[0.9])
    nesterov: bool = Field(False, description="sgd: Nesterov momentum")
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2, description="adamw: decay of both moments")
    eps: float = Field(1e-8, gt=0.0, description="adamw: added to the denominator")

    @model_validator(mode="after")
    def _fits_its_name(self) -> Self:
        if self.make is not None:
            _only_with(self, "make", ("lr", "args"), "an optimizer")
            return self
        foreign = {"sgd": {"betas", "eps", "args"}, "adamw": {"momentum", "nesterov", "args"}}[self.name]
        if wrong := sorted(foreign & self.model_fields_set):
            raise ValueError(f"{self.name} has no {' or '.join(wrong)}; remove it, or change name")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs a momentum; add momentum: 0.9, or remove nesterov")
        return self


class ScheduleSettings(Strict):
    """The learning rate over steps: a linear warm-up, then constant or a decay from lr to lr * final."""

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="the shape after the warm-up")
    warmup_steps: NonNegative = Field(0, description="steps of the linear warm-up", examples=[100])
    final: float = Field(0.0, ge=0.0, le=1.0, description="learning rate at the end, as a share of lr", examples=[0.1])


class TrainFields(Strict):
    """The keys of `train:`, each validated separately; `jobs/spec/train.py` checks them against each other."""

    model: ModelSettings = Field(description="the model", examples=["vgg11"])
    data: DataSettings = Field(description="the data", examples=["digits"])
    loss: Made | None = Field(
        None,
        description=(
            "a function of outputs and targets that returns their mean loss, or (sum, count); default: cross-entropy "
            "of logits"
        ),
        examples=["net.py:loss"],
    )
    mode: Annotated[str, one_of("mode", MODES)] = Field(
        "ddp", description="how the work is split: [modes](modes.md)", examples=["bucketed"]
    )
    parallel: ParallelSettings | None = Field(
        None, description="a split given by its degrees, in place of `mode`", examples=[{"data": 2, "pipe": 2}]
    )
    batch_size: Positive = Field(64, description="samples of a step, over all ranks together")
    batch_size_per_rank: Positive | None = Field(
        None,
        description="samples of a step for each data-parallel rank, in place of batch_size. The batch is fixed when "
        "the run is submitted, and stays the same if the run continues on other numbers of ranks",
        examples=[32],
    )
    epochs: Positive | None = Field(None, description="passes over the data; default: 1 unless steps is given")
    steps: Positive | None = Field(None, description="optimizer steps, in place of epochs", examples=[1000])
    log_every: Positive = Field(
        20,
        description="steps from one log point to the next; "
        "at log points ranks report progress, save on request and record timelines; every save and every copy in "
        "memory is a log point, too",
    )
    seed: Seed = Field(0, description="seed of weights, order of the data, augmentation and dropout")
    deterministic: bool = Field(False, description="use PyTorch's deterministic algorithms only")
    exact: bool = Field(False, description="compute the same bits on every number of ranks that divides virtual_ranks")
    virtual_ranks: Positive | None = Field(
        None,
        description="with exact: parts of the batch, whose gradients are summed in a fixed order; default: 4",
        examples=[8],
    )
    grad_accumulation: Positive = Field(
        1, description="micro-batches of a step; only the last one communicates. Pipelines use microbatches instead"
    )
    microbatches: Positive | None = Field(
        None, description="pipelines: micro-batches of a batch; default: 4 per rank; mode model has 1", examples=[8]
    )
    chunks: Annotated[int, Field(ge=2)] = Field(2, description="mode interleaved: slices of the model on each rank")
    cut: Literal["count", "parameters", "flops", "profile"] | list[NonNegative | str] = Field(
        "flops",
        description="pipelines: the quantity to balance over the stages, or a list of the first layers of all stages "
        "but the first, by name or number",
        examples=[["block3", "norm"]],
    )
    clip_norm: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="clip gradients to this global norm", examples=[1.0]
    )
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="when loss or gradients are not finite: stop before the update, or skip it and continue"
    )
    precision: Precision = Field(
        "fp32",
        description="bf16 and fp16: autocast, fp16 with loss scaling; pure_bf16: weights in bf16, with fp32 masters in "
        "the optimizer",
    )
    compile: bool = Field(False, description="use torch.compile, block by block")
    activation_checkpointing: bool = Field(False, description="recompute every block in the backward, to save memory")
    cuda_graph: Literal["auto"] | bool = Field(
        "auto",
        description="record the step as a CUDA graph and replay it; in a pipeline, each forward and backward. `auto` "
        "does so on GPUs where it can, and says why if not; `true` refuses a job that cannot be recorded",
    )
    bucket_size_mb: Annotated[float, Field(gt=0.0)] | None = Field(
        25.0, description="modes bucketed, zero1, zero2: largest bucket, in MB of 2^20 bytes; null: one bucket"
    )
    accumulate: Literal["local", "sharded"] = Field(
        "local",
        description="modes zero1, zero2, zero3, fsdp: `local` adds micro-batches to whole gradients and communicates "
        "once per step; `sharded` communicates after each, with less memory",
    )
    reshard_after_forward: bool = Field(
        True,
        description="modes zero3 and fsdp: free gathered parameters after the forward, and gather them again in the "
        "backward",
    )
    sequence_parallel: bool = Field(
        False,
        description="tensor parallel: split the tokens of norms and dropout over the ranks too, to save memory",
    )
    communication_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="dtype in which gradients are sent, except in ddp and fsdp; default: their own"
    )
    find_unused_parameters: bool = Field(
        False,
        description="the loss need not depend on every parameter in every step. The optimizer skips a parameter in "
        "steps in which no rank uses it",
    )
    profile: ProfileSettings = Field(
        OFF, description="record some steps of every rank: [profiles](see.md#profiles)", examples=[True]
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if every rank has one")
    optimizer: OptimizerSettings = Field(
        OptimizerSettings(), description="the optimizer", examples=[{"name": "adamw", "lr": 3e-4}]
    )
    schedule: ScheduleSettings = Field(
        ScheduleSettings(), description="the learning rate over steps", examples=[{"name": "cosine"}]
    )
    tensorboard: bool = Field(
        False,
        description="write losses, rates and evaluations for TensorBoard, into `tensorboard/` of the run folder",
        examples=[True],
    )
    evaluate: bool | Literal["all"] = Field(
        True,
        description="evaluate on held-out samples after every epoch and at the end: all images, or 1024 windows spread "
        "over the last tenth of a text; `all`: the whole last tenth",
    )
    augment: bool | None = Field(None, description="crop and flip images; default: only for cifar10", examples=[False])
    loader_workers: NonNegative = Field(
        0, description="processes of each rank that load batches in advance; 0: the rank loads them itself"
    )

    @model_validator(mode="before")
    @classmethod
    def _may_be_null(cls, given: Any) -> Any:
        """Drop a key that is null, so that `--set train.mode=null` makes room for `parallel:`."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key not in REPLACED}

    @field_validator("model", "data", mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
