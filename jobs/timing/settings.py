"""The `timing:` section of a job file: time models on one rank, without data, disk or network. Torch-free."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import unknown
from muster.jobs.models.model_shape import resolve_shape
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES, GptShape, VggShape
from muster.jobs.spec.strict import NonNegative, Positive, Seed, Strict, as_list, one_or_many
from muster.jobs.spec.train import TrainSettings
from muster.jobs.spec.train_fields import Precision

ALL: Final = "all"
NAMES: Final = (*VGG_SHAPES, *GPT_SHAPES)
CLASSES: Final = 10
OF_GPTS: Final = ("context", "vocabulary", "norm", "bias", "tied")
OF_TRAIN: Final = ("model", "data", "loss", "optimizer", "augment")  # keys of a train: section that affect the timing

Pass = Literal["forward", "backward", "step"]


def _models(schema: dict[str, Any]) -> None:
    schema["items"]["enum"] = [ALL, *NAMES]
    one_or_many(schema)


@dataclass(frozen=True)
class Case:
    """The model, pass and precision of one row."""

    model: str
    pass_name: Pass
    precision: Precision
    is_own: bool = False  # True for the model of the section `train`

    @property
    def name(self) -> str:
        """The case in words, such as gpt-nano step fp32."""
        return f"{self.model} {self.pass_name} {self.precision}"

    @property
    def is_image(self) -> bool:
        """True for a built-in model of images; other built-in models read tokens."""
        return self.model in VGG_SHAPES


class TimingSettings(Strict):
    """`timing:` - the models to time, their passes and precisions, and the numbers of steps."""

    model: list[str] = Field(
        [],
        description="models by name, or `all`",
        examples=["gpt-small"],
        json_schema_extra=_models,
    )
    train: dict[str, Any] | None = Field(
        None,
        description="a `train:` section: its model is timed on its own data, with its loss and optimizer; other keys "
        "are not used",
        examples=[{"model": {"make": "net.py:build"}, "data": "digits"}],
    )
    passes: list[Pass] = Field(
        ["forward", "backward", "step"],
        min_length=1,
        description="parts of a step to time: `backward` includes the forward, `step` also the optimizer (AdamW)",
        json_schema_extra=one_or_many,
    )
    precision: list[Precision] = Field(
        ["fp32"], min_length=1, description="as train.precision", json_schema_extra=one_or_many
    )
    warmup: NonNegative = Field(1, description="steps of a launch before the timed ones")
    steps: Positive = Field(2, description="timed steps of each launch")
    launches: Positive = Field(3, description="fresh processes for each row: the unit of the statistics")
    batch: Positive = Field(16, description="samples of a step")
    context: Positive = Field(128, description="GPT: tokens of a sample")
    vocabulary: Positive = Field(10_000, description="GPT: number of tokens")
    norm: Literal["rms", "rms_fused", "layer"] = Field(
        "rms", description="GPT: RMSNorm, RMSNorm as one Triton kernel each way (on GPUs), or LayerNorm"
    )
    bias: bool = Field(False, description="GPT: linear layers have biases")
    tied: bool = Field(True, description="GPT: the embedding and the head share their weight")
    compile: bool = Field(False, description="use torch.compile, block by block")
    activation_checkpointing: bool = Field(False, description="recompute every block in the backward")
    dtypes: bool = Field(False, description="show the dtypes that autocast chooses for each layer, and time nothing")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    timeout_s: Annotated[float, Field(gt=0.0)] = Field(
        300.0, description="time limit for each launch of a row, in seconds"
    )
    matmul: bool = Field(True, description="also time a large matrix product, for comparison")
    memory_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.9, description="share of a host's free memory that a model may fill"
    )
    seed: Seed = Field(0, description="seed of weights and data")

    @field_validator("model", "passes", "precision", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return as_list(value)

    @field_validator("model")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in (*NAMES, ALL):
                raise ValueError(unknown("model", name, (ALL, *NAMES)))
        return names

    @field_validator("train")
    @classmethod
    def _trains(cls, section: dict[str, Any] | None) -> dict[str, Any] | None:
        if section is not None:
            _own_training(section, {})
        return section

    @model_validator(mode="after")
    def _fit_the_models(self) -> Self:
        if not self.model and self.train is None:
            raise ValueError("no model is named; add model: with names, or train: with a section")
        if self.dtypes and self.train is not None:
            raise ValueError("dtypes is for built-in models; remove dtypes or train")
        fields = type(self).model_fields
        foreign = [name for name in OF_GPTS if getattr(self, name) != fields[name].default]
        if foreign and all(name in VGG_SHAPES for name in self.models()):
            raise ValueError(f"{foreign[0]} is for GPTs, but none is timed; remove it, or name a GPT")
        return self

    def models(self) -> list[str]:
        """List the models, with `all` expanded, each once."""
        return list(dict.fromkeys(each for name in self.model for each in (NAMES if name == ALL else (name,))))

    def cases(self) -> list[Case]:
        """List the rows in the order in which they are measured."""
        # dtypes are listed only for whole steps
        passes: list[Pass] = ["step"] if self.dtypes else list(dict.fromkeys(self.passes))
        precisions = dict.fromkeys(self.precision)
        rows = [(name, False) for name in self.models()] + [(name, True) for name in [self.own_name] if name]
        return [Case(name, each, how, is_own) for name, is_own in rows for how in precisions for each in passes]

    @property
    def own_name(self) -> str:
        """The name of the model of `train` in rows; empty if there is none."""
        if self.train is None:
            return ""
        model = _own_training(self.train, {}).model
        return model.make or f"train:{model.title}"

    @property
    def makes(self) -> dict[str, str]:
        """The keys that name the user's own code, with their values."""
        return {} if self.train is None else _own_training(self.train, {}).makes

    def training(self, case: Case) -> TrainSettings:
        """Return the training settings of a row, so that timing runs exactly what a `train:` job would run."""
        timed = {
            "batch_size": self.batch,
            "steps": self.steps,
            "precision": case.precision,
            "compile": self.compile,
            "activation_checkpointing": self.activation_checkpointing,
            "device": self.device,
            "seed": self.seed,
        }
        if case.is_own:
            assert self.train is not None
            return _own_training(self.train, timed)
        model: dict[str, Any] = {"name": case.model}
        if not case.is_image:
            model |= {name: getattr(self, name) for name in OF_GPTS}
        optimizer = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}
        return TrainSettings.model_validate(
            {"model": model, "data": "synthetic", "mode": "single", "optimizer": optimizer, **timed}
        )

    def shape(self, case: Case) -> VggShape | GptShape:
        """Return the shape of a row's built-in model."""
        return resolve_shape(self.training(case).model, CLASSES if case.is_image else self.vocabulary)

    def check_world(self, world_size: int) -> None:
        """Refuse settings that do not fit the world size.

        Raises:
            RefusedError: if there is more than one rank.
        """
        if world_size > 1:
            raise RefusedError(
                f"timing: runs on one rank, but this job has {world_size}; set nodes: 1 and ranks_per_node: 1, or use "
                "a train: job to time several ranks"
            )


def _own_training(section: dict[str, Any], timed: dict[str, Any]) -> TrainSettings:
    """Return the settings for timing a `train:` section on one rank.

    Raises:
        ValueError: if the section is invalid.
    """
    return TrainSettings.model_validate(
        {key: section[key] for key in OF_TRAIN if key in section} | {"mode": "single", **timed}
    )
