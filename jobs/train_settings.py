"""`train:` of a job file, typed: a model, its data, how the work is split, in which numbers, and for how long."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from jobs.errors import RefusedError
from jobs.modes import MODES, Parallel, Sync, Zero, mode_of
from jobs.profile_settings import OFF, ProfileSettings
from jobs.shapes import GPT_SHAPES, VGG_SHAPES
from jobs.strict import NonNegative, Positive, Strict
from jobs.train_graph import why_not_recorded
from jobs.train_sharding import why_not_sharded
from jobs.words import counted, unknown

DATA_NAMES: Final = ("digits", "cifar10", "python-source", "synthetic")
OWN_SUMS: Final = ", ".join(name for name, mode in MODES.items() if mode.can_be_exact)  # the modes whose sums are ours

Precision = Literal["fp32", "fp64", "bf16", "fp16", "pure_bf16"]


class ModelSettings(Strict):
    """A model: a named row of `jobs/shapes.py`, with overrides, or a GPT given by its four sizes."""

    name: str | None = None
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

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is not None and name not in VGG_SHAPES and name not in GPT_SHAPES:
            raise ValueError(unknown("model", name, (*VGG_SHAPES, *GPT_SHAPES)))
        return name

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        sizes = {"d_model": self.d_model, "d_ff": self.d_ff, "layers": self.layers, "heads": self.heads}
        given = [key for key, value in sizes.items() if value is not None]
        if self.name is None and len(given) < len(sizes):
            missing = ", ".join(key for key in sizes if key not in given)
            raise ValueError(f"a model needs a name or all four sizes; missing: {missing}")
        if self.name is not None and given:
            raise ValueError(f"a named model has its sizes already; remove name or {', '.join(given)}")
        return self

    @property
    def is_vgg(self) -> bool:
        """True for an image model."""
        return self.name in VGG_SHAPES


class DataSettings(Strict):
    """A data set: a name of `DATA_NAMES`, or a text file of the user's own (`{text: PATH}`)."""

    name: str | None = None
    text: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.name is None) == (self.text is None):
            raise ValueError("data is either a name or {text: PATH}")
        if self.name is not None and self.name not in DATA_NAMES:
            raise ValueError(unknown("data", self.name, DATA_NAMES))
        return self


class OptimizerSettings(Strict):
    """The optimizer; `betas` and `eps` belong to adamw, `momentum` and `nesterov` to sgd."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0.0)] = 0.01
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    nesterov: bool = False
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8

    @model_validator(mode="after")
    def _fits_its_name(self) -> Self:
        foreign = {"sgd": {"betas", "eps"}, "adamw": {"momentum", "nesterov"}}[self.name]
        if wrong := sorted(foreign & self.model_fields_set):
            raise ValueError(f"{self.name} has no {' or '.join(wrong)}")
        return self


class ScheduleSettings(Strict):
    """The learning rate over steps: a linear warm-up, then a shape from lr down to lr * final."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    final: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0


class ParallelSettings(Strict):
    """A split written out, for products that no mode names."""

    data: Positive = 1
    zero: Zero = Field(0, description="ZeRO's stage, shared out by sync: sharded (its default) or fsdp (3)")
    sync: Sync = "ddp"

    @model_validator(mode="before")
    @classmethod
    def _shares_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        more = {"sync": "sharded"} if given.get("zero") and "sync" not in given else {}
        return {**more, **({"zero": 3} if given.get("sync") == "fsdp" else {}), **given}

    @model_validator(mode="after")
    def _is_one_way(self) -> Self:
        stages = {"sharded": (1, 2, 3), "fsdp": (3,)}.get(self.sync, (0,))
        if self.zero not in stages:
            raise ValueError(
                f"zero: {self.zero} does not go with sync: {self.sync}; zero 1, 2 and 3 go with sharded, 3 with fsdp, "
                "0 with all others"
            )
        return self


class TrainSettings(Strict):
    """`train:` - a model, its data, how the work is split, and for how long."""

    model: ModelSettings
    data: DataSettings
    mode: str = "ddp"
    parallel: ParallelSettings | None = None
    batch_size: Positive = Field(64, description="global: the same whatever the number of ranks")
    epochs: Positive | None = None
    steps: Positive | None = None
    log_every: Positive = 20
    seed: NonNegative = 0
    deterministic: bool = False
    exact: bool = Field(False, description="the same bits on any number of ranks that divides virtual_ranks")
    virtual_ranks: Positive | None = None
    grad_accumulation: Positive = 1
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None
    precision: Precision = Field(
        "fp32", description="bf16, fp16: autocast, fp16 with loss scaling; pure_bf16: weights too, with fp32 masters"
    )
    compile: bool = Field(False, description="torch.compile, block by block")
    activation_checkpointing: bool = Field(False, description="forward every block again in the backward, to keep less")
    cuda_graph: bool = Field(False, description="record the whole step once, then replay it; for small models on CUDA")
    bucket_size_mb: Annotated[float, Field(gt=0.0)] | None = Field(
        25.0,
        description="of modes bucketed, zero1 and zero2, at most; null: all gradients in one bucket; "
        "other modes do not read it",
    )
    accumulate: Literal["local", "sharded"] = Field(
        "local",
        description="of modes zero1, zero2, zero3 and fsdp: what micro-batches add to; local: whole gradients, which "
        "are shared out once a step; sharded: each rank's share, after every micro-batch, for less memory and more "
        "communication; other modes do not read it",
    )
    reshard_after_forward: bool = Field(
        True,
        description="of modes zero3 and fsdp: give gathered parameters back after the forward, and gather them again "
        "in the backward; other modes do not read it",
    )
    layerwise: bool = Field(
        False,
        description="of mode zero3, to learn from: parameters gathered layer by layer, gradients taken with one "
        "torch.autograd.grad a layer; other modes do not read it",
    )
    communication_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="what gradients are sent as; default: as they are. For the modes with our own wrappers"
    )
    profile: ProfileSettings = Field(
        OFF, description="traces, operators, flame graph and overlap of some steps of every rank"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluate: bool = True
    augment: bool | None = Field(None, description="crop and flip; default: only for cifar10")
    loader_workers: NonNegative = Field(0, description="processes that load batches ahead; 0: in the rank itself")

    @field_validator("model", mode="before")
    @classmethod
    def _name_of_model(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("data", mode="before")
    @classmethod
    def _name_of_data(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("mode")
    @classmethod
    def _mode_is_known(cls, mode: str) -> str:
        if mode not in MODES:
            raise ValueError(unknown("mode", mode, tuple(MODES)))
        return mode

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if self.parallel is not None and "mode" in self.model_fields_set:
            raise ValueError("give mode or parallel, not both")
        if self.exact and not MODES[self.mode_name].can_be_exact:
            raise ValueError(f"exact: true needs one of the modes {OWN_SUMS}, got {self.mode_name}")
        if self.virtual_ranks is not None and not self.exact:
            raise ValueError("virtual_ranks needs exact: true")
        if self.data.name in ("digits", "cifar10") and not self.model.is_vgg:
            raise ValueError(f"data {self.data.name} is images, model {self.model.name or 'gpt'} reads tokens")
        if (self.data.name == "python-source" or self.data.text) and self.model.is_vgg:
            raise ValueError(f"data {self.data.name or 'text'} is tokens, model {self.model.name} reads images")
        return self

    @model_validator(mode="after")
    def _can_be_recorded(self) -> Self:
        if self.cuda_graph and (why := why_not_recorded(self)):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _can_be_sharded(self) -> Self:
        if why := why_not_sharded(self):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _can_communicate_so(self) -> Self:
        if self.communication_dtype is not None and not MODES[self.mode_name].can_be_exact:
            raise ValueError(f"communication_dtype needs one of the modes {OWN_SUMS}, got {self.mode_name}; remove it")
        if self.communication_dtype is not None and self.exact:
            raise ValueError("communication_dtype rounds what exact: true promises to the bit; remove one of the two")
        return self

    @property
    def mode_name(self) -> str:
        """The mode; of a split that is written out, the one whose gradients are shared in the same way."""
        if self.parallel is None:
            return self.mode
        return mode_of(self.parallel.sync, self.parallel.zero)

    @property
    def same_norm(self) -> bool:
        """True where gradients are clipped by a norm that has the same bits whoever has which of them."""
        return self.exact or self.deterministic

    def split(self, world_size: int) -> Parallel:
        """Expand mode or `parallel:` for a world size.

        Raises:
            RefusedError: the split does not fit the world size.
        """
        if self.parallel is None:
            return MODES[self.mode].expand(world_size)
        parallel = Parallel(data=self.parallel.data, sync=self.parallel.sync, zero=self.parallel.zero)
        if parallel.world_size != world_size:
            raise RefusedError(
                f"train.parallel: data {parallel.data} makes {counted(parallel.world_size, 'rank')}, "
                f"the job has {world_size}; set nodes and ranks_per_node to match"
            )
        return parallel

    def virtual_world_size(self, world_size: int) -> int:
        """Return the number of shards of a global batch: `virtual_ranks` when exact (default 4), else one a rank."""
        return (self.virtual_ranks or 4) if self.exact else world_size

    def check(self, world_size: int) -> None:
        """Refuse what only the world size shows.

        Raises:
            RefusedError: too small a batch, or virtual ranks that the ranks do not divide.
        """
        self.split(world_size)
        shards = self.virtual_world_size(world_size)
        if shards % world_size:
            raise RefusedError(
                f"train.virtual_ranks: {counted(shards, 'virtual rank')} cannot be dealt evenly to {world_size} ranks; "
                f"set virtual_ranks to a multiple of {world_size}"
            )
        if self.batch_size < shards * self.grad_accumulation:
            raise RefusedError(
                f"train.batch_size: {self.batch_size} is less than one sample for each of {counted(shards, 'rank')}"
                + (f" x {self.grad_accumulation} accumulation steps" if self.grad_accumulation > 1 else "")
                + f"; use at least {shards * self.grad_accumulation}"
            )
