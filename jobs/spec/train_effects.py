"""Which modes, models and schedules read a setting of a `train:` section; the others refuse it.

A setting without effect would make a sweep compare equal runs. It is no mistake in two places. A sweep over modes
refuses a key only if none of its points reads it, and a run that is resumed in another mode continues without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.spec.job import Unread
from muster.jobs.spec.train_parallel import split_text

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


@dataclass(frozen=True)
class Reader:
    """One row: a key, the test for settings that read it, and who they are in words."""

    key: tuple[str, ...]
    reads: Callable[["TrainSettings"], bool]
    readers: str


def _has_buckets(settings: "TrainSettings") -> bool:
    return settings.sync == "bucketed" or (settings.sync == "sharded" and settings.zero < 3)


def _by_layers(settings: "TrainSettings") -> bool:
    return settings.is_pipeline or (settings.sync == "sharded" and settings.zero == 3)


def _accumulates(settings: "TrainSettings") -> bool:
    by_layers = settings.layerwise and settings.sync == "sharded" and settings.zero == 3
    return settings.zero > 0 and not settings.is_pipeline and not by_layers


def _cuts_batches(settings: "TrainSettings") -> bool:
    return settings.is_pipeline and settings.mode_name != "model"


READERS: Final = (
    Reader(("bucket_size_mb",), _has_buckets, "modes bucketed, zero1 and zero2"),
    Reader(("accumulate",), _accumulates, "modes zero1, zero2, zero3 without layerwise, and fsdp"),
    Reader(
        ("reshard_after_forward",),
        lambda settings: _accumulates(settings) and settings.zero == 3,
        "modes zero3 without layerwise, and fsdp",
    ),
    Reader(("layerwise",), _by_layers, "mode zero3 and pipelines"),
    Reader(("sequence_parallel",), lambda settings: settings.splits_layers, "mode tensor"),
    Reader(("microbatches",), _cuts_batches, "pipelines other than mode model"),
    Reader(("parallel", "microbatches"), _cuts_batches, "pipelines other than schedule model"),
    Reader(("chunks",), lambda settings: settings.mode_name == "interleaved", "mode interleaved"),
    Reader(("cut",), lambda settings: settings.is_pipeline, "pipelines"),
    Reader(("augment",), lambda settings: settings.model.is_vgg, "images"),
    Reader(("schedule", "final"), lambda settings: settings.schedule.name != "constant", "linear and cosine"),
)


def unread(settings: "TrainSettings") -> list[Unread]:
    """List the keys that were given but have no effect."""
    found = []
    for row in READERS:
        *above, name = row.key
        section: Any = settings
        for part in above:
            section = getattr(section, part)
        if section is None or name not in section.model_fields_set or row.reads(settings):
            continue
        where = {"augment": "on text", "final": "with schedule constant"}.get(name, f"in mode {split_text(settings)}")
        text = f"has no effect {where}; it is for {row.readers}"
        is_default = getattr(section, name) == type(section).model_fields[name].default
        found.append(Unread(row.key, text, is_default))
    return found
