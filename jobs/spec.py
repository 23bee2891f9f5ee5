"""The typed job: what a job file says, with its defaults. Past `jobs/load.py` there are no dicts and no defaults.

Every model refuses unknown keys and wrong types. What one model cannot know (line numbers, the world size, the
kinds of job) is checked by its callers: `jobs/load.py` and `jobs/placement.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny, field_validator, model_validator
from typing_extensions import Self

from jobs.errors import RefusedError
from jobs.failover_settings import CheckpointSettings, RestartSettings
from jobs.modes import MODES, Parallel
from jobs.shapes import GPT_SHAPES, VGG_SHAPES
from jobs.slurm_settings import SlurmSettings
from jobs.strict import Strict
from jobs.words import counted

MAX_NODES: Final = 100_000
MAX_RANKS_PER_NODE: Final = 1024
DATA_NAMES: Final = ("digits", "cifar10", "python-source", "synthetic")

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


MAX_STRING_BYTES: Final = 131_072  # MAX_ARG_STRLEN of Linux: one argument, or NAME=value, with the zero at its end


def _passable(text: str) -> str:
    """Return a text that a program can be handed."""
    if "\0" in text:
        raise ValueError("must not hold a zero byte (\\0): no program can be handed one")
    if (size := len(text.encode(errors="replace")) + 1) > MAX_STRING_BYTES:
        raise ValueError(f"must be shorter than {MAX_STRING_BYTES} bytes, which is Linux's limit, got {size}")
    return text


def _is_variable(name: str) -> str:
    """Return a name that an environment variable can have."""
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"a variable's name must be text without = and zero bytes, got {name!r}; correct the name")
    return name


Passable = Annotated[str, AfterValidator(_passable)]
Variable = Annotated[str, AfterValidator(_is_variable)]


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
    sync: Literal["none", "gather_scatter", "allreduce", "ddp"] = "ddp"


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
    precision: Literal["fp32", "fp64"] = "fp32"
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
        if self.exact and not MODES[self.mode].can_be_exact:
            exact_modes = ", ".join(name for name, mode in MODES.items() if mode.can_be_exact)
            raise ValueError(f"exact: true needs one of the modes {exact_modes}, got {self.mode}")
        if self.virtual_ranks is not None and not self.exact:
            raise ValueError("virtual_ranks needs exact: true")
        if self.data.name in ("digits", "cifar10") and not self.model.is_vgg:
            raise ValueError(f"data {self.data.name} is images, model {self.model.name or 'gpt'} reads tokens")
        if (self.data.name == "python-source" or self.data.text) and self.model.is_vgg:
            raise ValueError(f"data {self.data.name or 'text'} is tokens, model {self.model.name} reads images")
        return self

    def split(self, world_size: int) -> Parallel:
        """Expand mode or `parallel:` for a world size.

        Raises:
            RefusedError: the split does not fit the world size.
        """
        if self.parallel is None:
            return MODES[self.mode].expand(world_size)
        parallel = Parallel(data=self.parallel.data, sync=self.parallel.sync)
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


class CommandSettings(Strict):
    """`command:` - any program that reads torchrun's variables; started fresh on every rank."""

    argv: Annotated[list[Passable], Field(min_length=1)]

    @field_validator("argv")
    @classmethod
    def _names_a_program(cls, argv: list[str]) -> list[str]:
        if not argv[0]:
            raise ValueError("the first item is the program to run, and it is empty; name one")
        return argv


class Job(Strict):
    """A whole job file. `kind` says which of `train`, `command`, `bench` the file gave; `settings` is that section."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "job"
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    ranks_per_node: Annotated[int, Field(ge=1, le=MAX_RANKS_PER_NODE)] | Literal["slots"] = 1
    threads_per_rank: Positive | Literal["auto"] = 1
    env: dict[Variable, Passable] = Field(default_factory=dict)
    workdir: str | None = None
    setup: list[str] = Field(default_factory=list)
    start_timeout_s: Annotated[float, Field(gt=0.0)] = 60.0
    grace_s: Annotated[float, Field(ge=0.0)] = 5.0
    hang_s: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="seconds without progress on any rank; default: 30, or 10 of the slowest steps if longer"
    )
    checkpoint: CheckpointSettings | None = None
    restart: RestartSettings | None = None
    slurm: SlurmSettings = SlurmSettings()
    kind: str
    settings: SerializeAsAny[BaseModel]

    @model_validator(mode="after")
    def _can_be_saved(self) -> Self:
        if self.checkpoint is not None and self.kind != "train":
            raise ValueError(f"checkpoint is for train: jobs; Muster saves nothing of a {self.kind}: job: remove it")
        return self

    @field_validator("env")
    @classmethod
    def _fits_a_process(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if (size := len(f"{name}={value}".encode(errors="replace")) + 1) > MAX_STRING_BYTES:
                limit = f"with its name and = it must be shorter than {MAX_STRING_BYTES} bytes, which is Linux's limit"
                raise ValueError(f"{name}: {limit}, got {size}")
        return env


@dataclass(frozen=True)
class JobKind:
    """One kind of job: the key in the file, the type of its section, and what a rank runs.

    `entry` is "module:function" called with the payload of the start message in a process forked from the warm
    one, or None for a program started fresh. `check(settings, world_size)` raises RefusedError.
    """

    key: str
    settings: type[BaseModel]
    entry: str | None
    check: Callable[[Any, int], None]


def unknown(what: str, name: str, valid: tuple[str, ...]) -> str:
    """Say that a name is not in a table, with the nearest one that is."""
    import difflib

    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{hint} (valid: {', '.join(valid)})"
