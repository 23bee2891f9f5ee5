"""Tables of `train:` keys that conflict with each other, and of keys that have no effect.

CONFLICTS   is searched from the top. The first matching row refuses the section, with the reason and the remedy.
READERS     lists which settings read a key. A key without effect is refused as well, because a sweep over it would
            compare equal runs. There are two exceptions: a sweep over modes refuses a key only if no point reads it,
            and a run that is resumed in another mode ignores such keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.spec.expand import split_text
from muster.jobs.spec.job import Unread
from muster.jobs.spec.modes import MODES, SHARDED
from muster.jobs.spec.recorded import THROUGH_THE_HOST, UNRECORDABLE
from muster.jobs.spec.rules import TrainRules

Test = Callable[[TrainRules], bool]

# The modes in which Muster sums gradients itself, not PyTorch.
OWN_SUMS: Final = ", ".join(name for name, mode in MODES.items() if mode.can_be_exact)


@dataclass(frozen=True)
class Conflict:
    """One row of CONFLICTS: a test that detects the conflict, and a message with the reason and the remedy.

    `why` is a format string. It may use settings as `{s.key}`, and the words `{mode}`, `{model}` and `{data}`.
    """

    found: Test
    why: str


def _has_copies(s: TrainRules) -> bool:
    return s.parallel is not None and s.parallel.data > 1


def _sets_twice(s: TrainRules) -> bool:
    return s.microbatches is not None and s.parallel is not None and s.parallel.microbatches is not None


ANY: Final = (
    Conflict(lambda s: s.epochs is not None and s.steps is not None, "give epochs or steps, not both"),
    Conflict(
        lambda s: s.batch_size_per_rank is not None and "batch_size" in s.model_fields_set,
        "give batch_size (of all ranks together) or batch_size_per_rank, not both; null removes one: "
        "--set train.batch_size=null",
    ),
    Conflict(
        lambda s: s.parallel is not None and "mode" in s.model_fields_set,
        "give mode or parallel, not both; null removes one: --set train.mode=null",
    ),
    Conflict(
        lambda s: s.exact and not MODES[s.mode_name].can_be_exact,
        f"exact: true needs one of the modes {OWN_SUMS}, got {{mode}}",
    ),
    Conflict(lambda s: s.virtual_ranks is not None and not s.exact, "virtual_ranks needs exact: true"),
    Conflict(
        lambda s: s.data.name in ("digits", "cifar10") and s.model.reads_tokens,
        "data {data} has images, but model {model} reads tokens; choose another model, or other data",
    ),
    Conflict(
        lambda s: bool(s.data.name == "python-source" or s.data.text) and not s.model.reads_tokens,
        "data {data} has tokens, but model {model} reads images; choose another model or other data, or set "
        "model.context if the function in model.make returns a model of tokens",
    ),
)

RECORDED: Final = (
    Conflict(lambda s: s.device == "cpu", "cuda_graph needs a CUDA device, but device is cpu; remove one of them"),
    *(
        Conflict(row.found, f"cuda_graph cannot be combined with {row.what}: {row.why}; {row.remedy}")
        for row in UNRECORDABLE
    ),
)

SPLIT_LAYERS: Final = (
    Conflict(
        lambda s: s.model.is_vgg,
        "model: {model}: tensor parallel can split the layers of a gpt, but not those of a vgg; "
        "choose a gpt, or a data-parallel mode",
    ),
    Conflict(
        lambda s: s.model.make is None and s.loss is not None,
        "loss: {s.loss} cannot be combined with tensor parallel, which splits the logits of a gpt; remove loss, or "
        "choose another mode",
    ),
    Conflict(
        lambda s: s.model.make is not None and s.model.plan is None,
        "model: {model}: tensor parallel needs to know how to split its layers; give model.plan, a function that "
        "returns a plan of muster.pipe.tensor, or choose a data-parallel mode or a pipeline",
    ),
    Conflict(
        lambda s: s.exact,
        "exact: true cannot be combined with tensor parallel, which adds the parts of a product in another order than "
        "one process; set exact: false, or choose another mode",
    ),
    Conflict(
        lambda s: s.zero == 3,
        "zero: 3 with sync: {s.sync} cannot be combined with tensor parallel, which splits the parameters over ranks "
        "itself; use zero: 0, 1 or 2",
    ),
)

SHARED_OUT: Final = (
    Conflict(
        lambda s: s.exact and s.accumulate == "sharded" and s.mode_name != "fsdp",
        "accumulate: sharded sums every micro-batch over the ranks, but exact: true sums on each rank first; "
        "set accumulate: local, or exact: false",
    ),
)

PIPELINED: Final = (
    Conflict(
        lambda s: s.grad_accumulation > 1,
        "grad_accumulation: {s.grad_accumulation} cannot be combined with {mode}, which cuts a batch into "
        "microbatches and adds up their gradients; remove it, or set microbatches",
    ),
    Conflict(
        _sets_twice,
        "microbatches: {s.microbatches} and parallel.microbatches: {s.parallel.microbatches} set "
        "the same thing; remove one of them",
    ),
    Conflict(
        lambda s: s.communication_dtype is not None,
        "{mode} sends activations and gradients in their own dtype; remove communication_dtype",
    ),
    Conflict(lambda s: s.compile, "{mode} cannot be combined with compile yet; set compile: false"),
    Conflict(
        lambda s: s.exact and s.virtual_ranks not in (None, 1),
        "{mode} has one virtual rank, but virtual_ranks is {s.virtual_ranks}; remove virtual_ranks",
    ),
    Conflict(
        lambda s: s.exact and _has_copies(s),
        "exact: true cannot be combined with {s.parallel.data} data-parallel pipelines yet; "
        "set parallel.data: 1, or exact: false",
    ),
)

SLICED: Final = (
    Conflict(
        lambda s: s.model.is_vgg or s.model.make is not None,
        "model: {model}: terapipe slices the sequences of built-in GPTs only, whose layers read earlier slices; "
        "choose a gpt or another mode, or use muster.pipe.Pipeline(tokens=) in your own program",
    ),
    Conflict(
        lambda s: s.model.dropout > 0.0,
        "terapipe cannot be combined with dropout, whose masks one process draws for whole sequences; set dropout: 0",
    ),
    Conflict(
        lambda s: s.activation_checkpointing,
        "terapipe cannot be combined with activation_checkpointing, because later slices read "
        "activations that a slice keeps; remove one of them",
    ),
)

ROUNDED: Final = (
    Conflict(
        lambda s: not MODES[s.mode_name].can_be_exact,
        f"communication_dtype needs one of the modes {OWN_SUMS}, got {{mode}}; remove it",
    ),
    Conflict(
        lambda s: s.exact,
        "communication_dtype rounds gradients, but exact: true guarantees the same bits; remove one of the two",
    ),
)

CONFLICTS: Final[tuple[tuple[Test, tuple[Conflict, ...]], ...]] = (
    (lambda s: True, ANY),
    (lambda s: s.cuda_graph is True, RECORDED),
    (lambda s: s.splits_layers, SPLIT_LAYERS),
    (lambda s: s.mode_name in SHARDED, SHARED_OUT),
    (lambda s: s.is_pipeline, PIPELINED),
    (lambda s: s.mode_name == "terapipe", SLICED),
    (lambda s: s.communication_dtype is not None, ROUNDED),
)


def conflict(settings: TrainRules) -> str | None:
    """Return why these settings conflict and what to do, or None if they do not."""
    for applies, rows in CONFLICTS:
        row = next((row for row in rows if row.found(settings)), None) if applies(settings) else None
        if row is not None:
            mode = settings.mode_name
            words = {
                "mode": mode,
                "model": settings.model.title,
                "data": settings.data.title,
                "host": THROUGH_THE_HOST.get(mode),
            }
            return row.why.format(s=settings, **words)
    return None


@dataclass(frozen=True)
class KeyReader:
    """One row of READERS: a key, a function that returns whether a job reads it, and a phrase that names such jobs."""

    key: tuple[str, ...]
    reads: Callable[[TrainRules], bool]
    readers: str


def _has_buckets(settings: TrainRules) -> bool:
    return settings.sync == "bucketed" or (settings.sync == "sharded" and settings.zero < 3)


def _accumulates(settings: TrainRules) -> bool:
    return settings.zero > 0 and not settings.is_pipeline


def _cuts_batches(settings: TrainRules) -> bool:
    return settings.is_pipeline and settings.mode_name != "model"


def _by_units(settings: TrainRules) -> bool:
    return settings.zero == 3 or settings.compile or settings.activation_checkpointing


READERS: Final = (
    KeyReader(("bucket_size_mb",), _has_buckets, "modes bucketed, zero1 and zero2"),
    KeyReader(("accumulate",), _accumulates, "modes zero1, zero2, zero3 and fsdp"),
    KeyReader(
        ("reshard_after_forward",),
        lambda settings: _accumulates(settings) and settings.zero == 3,
        "modes zero3 and fsdp",
    ),
    KeyReader(("sequence_parallel",), lambda settings: settings.splits_layers, "mode tensor"),
    KeyReader(("microbatches",), _cuts_batches, "pipelines other than mode model"),
    KeyReader(("parallel", "microbatches"), _cuts_batches, "pipelines other than schedule model"),
    KeyReader(("parallel", "tokens"), lambda settings: settings.mode_name == "terapipe", "schedule terapipe"),
    KeyReader(("chunks",), lambda settings: settings.mode_name == "interleaved", "mode interleaved"),
    KeyReader(("cut",), lambda settings: settings.is_pipeline, "pipelines"),
    KeyReader(("augment",), lambda settings: settings.data.make is None and not settings.model.reads_tokens, "images"),
    KeyReader(
        ("model", "vocabulary"),
        lambda settings: settings.model.make is None or settings.data.name == "synthetic",
        "built-in models and data synthetic",
    ),
    KeyReader(
        ("model", "context"),
        lambda settings: settings.model.make is None or settings.data.make is None,
        "built-in models and built-in data",
    ),
    KeyReader(("model", "units"), _by_units, "modes zero3 and fsdp, compile and activation_checkpointing"),
    KeyReader(("model", "plan"), lambda settings: settings.splits_layers, "mode tensor"),
    KeyReader(
        ("schedule", "final"), lambda settings: settings.schedule.name != "constant", "schedules linear and cosine"
    ),
)


def unread(settings: TrainRules) -> list[Unread]:
    """List the given keys that have no effect."""
    found = []
    for row in READERS:
        *above, name = row.key
        section: Any = settings
        for part in above:
            section = getattr(section, part)
        if section is None or name not in section.model_fields_set or row.reads(settings):
            continue
        places = {"augment": "on text", "final": "with schedule constant"}
        places |= dict.fromkeys(("vocabulary", "context"), "with a model from model.make on this data")
        where = places.get(name, f"in mode {split_text(settings)}")
        text = f"has no effect {where}; it is for {row.readers}"
        is_default = getattr(section, name) == type(section).model_fields[name].default
        found.append(Unread(row.key, text, is_default))
    return found
