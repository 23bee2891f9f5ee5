"""The part of a split model on one rank: some of its layers (pipe), and a part of each (tensor). Pure.

pipe      a stage's layers, with a copy of a tied weight if another stage has the first; batch norms' statistics
tensor    of a GPT's matrices, and of the biases of those that are split by outputs, one of as many parts as ranks;
          norms, the position embedding, and the biases of layers that sum the parts are whole on every rank
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from muster.collectives_bench.cost.load import Load, Split
from muster.collectives_bench.cost.modes import Schedule, Stage, cut
from muster.jobs.models.anatomy import Part, TensorShape
from muster.jobs.models.counted import CountedAnatomy, CountedPart, CountedTensor

GOING: Final = 1  # messages of a boundary under way at once, the limit of `pipe/wires/channels.py`
AHEAD: Final = 1  # and receives posted ahead
BY_OUTPUTS: Final = ("query", "key", "value", "up", "head")  # parts whose biases are split, too
WHOLE: Final = ("norm1", "norm2", "norm")
HANDS_ON_ALL: Final = (*WHOLE, "embed", "output", "down")  # parts whose whole output is on every rank
KEEPS_ALL: Final = (*WHOLE, "query", "up")  # parts that keep a norm's whole input or output


def stages_of(load: Load, split: Split, schedule: Schedule | None) -> list[Stage] | None:
    """Return each pipeline rank's part of the model, or all without a pipeline; None if it cannot be cut."""
    if split.tensor > 1 and not (load.model.width or isinstance(load.model, CountedAnatomy)):
        return None
    if schedule is None:
        return [Stage(load.model.parts, (load.model.parts[-1].outputs,))]
    return cut(load.model, schedule, split.pipe, split.stages)


def held_by(load: Load, stage: Stage, split: Split) -> Load:
    """Return the load of the tensors on this rank, which the ranks with the same tensors average or shard."""
    parts = tuple(_share(part, split.tensor) for part in (*stage.parts, *_copies(load, stage)))
    recorded = sum(t.elements for part in parts for t in part.tensors if load.model.buffers and _is(part, ("norm",)))
    return replace(load, model=replace(load.model, parts=parts, buffers=recorded), ranks=split.data, shards=None)


def kept_share(part: Part, split: Split, *, sequence: bool) -> float:
    """Return one rank's share of a part's tensors kept for the backward."""
    if isinstance(part, CountedPart):
        return 1.0 / split.tensor if part.splits_kept or sequence else 1.0
    return 1.0 if _is(part, KEEPS_ALL) and not sequence else 1.0 / split.tensor


def handed_share(part: Part, split: Split) -> float:
    """Return one rank's share of a part's output."""
    if isinstance(part, CountedPart):
        return 1.0 / split.tensor if part.splits_outputs else 1.0
    return 1.0 if _is(part, HANDS_ON_ALL) else 1.0 / split.tensor


def message_elements(load: Load, stage: Stage, split: Split) -> float:
    """Return the elements of one sample's messages that a stage holds beside the activations that it keeps.

    One sent message is under way: activations to later stages, gradients to earlier ones. On CPUs one receive beyond
    the current one is posted ahead in each direction; a received gradient keeps its buffer until it is used.
    """
    ahead = 0 if load.backend == "nccl" else AHEAD
    return ((GOING + 1 + ahead) * stage.sent + (GOING + ahead) * stage.received) * passed_share(load, split)


def passed_share(load: Load, split: Split) -> float:
    """Return one rank's share of an activation between layers."""
    return 1.0 / split.tensor if load.sequence else 1.0


def _copies(load: Load, stage: Stage) -> Sequence[Part]:
    """List the head's copy of the embedding, if the head is tied and the embedding is on another rank.

    For a made model, list every parameter that the stage uses and another rank has.
    """
    if isinstance(load.model, CountedAnatomy):
        own = {tensor.name for part in stage.parts for tensor in part.tensors}
        shared = {each.name: (part, each) for part in stage.parts for each in _shared(part) if each.name not in own}
        return [replace(part, tensors=(each,), buffer_bytes=0) for part, each in shared.values()]
    here = {part.name for part in stage.parts}
    if "head" not in here or "embed" in here or not load.model.width:
        return ()
    head = next(part for part in stage.parts if part.name == "head")
    return () if head.tensors else (Part("head", "head", load.model.tensors[:1]),)


def _shared(part: Part) -> tuple[CountedTensor, ...]:
    return part.shared if isinstance(part, CountedPart) else ()


def _share(part: Part, ranks: int) -> Part:
    if ranks == 1 or (_is(part, WHOLE) and not isinstance(part, CountedPart)):
        return part
    return replace(part, tensors=tuple(_cut(part, tensor, ranks) for tensor in part.tensors))


def _cut(part: Part, tensor: TensorShape, ranks: int) -> TensorShape:
    """Return the shape of a rank's part of a tensor; the dimension that is cut does not matter here."""
    if isinstance(tensor, CountedTensor):
        return tensor.share(ranks)
    whole = tensor.name.endswith("position.weight") or (len(tensor.shape) == 1 and not _is(part, BY_OUTPUTS))
    first, *others = tensor.shape
    return tensor if whole else TensorShape(tensor.name, (-(-first // ranks), *others))


def _is(part: Part, names: Sequence[str]) -> bool:
    """True if the last word of a part's name is in `names`; batch norms have a number after it."""
    last = part.name.rpartition(".")[2]
    return last in names or (names == ("norm",) and last.startswith("norm"))
