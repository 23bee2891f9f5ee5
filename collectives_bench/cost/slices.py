"""The part of a split model on one rank: some of its layers (pipe), or a part of each layer (tensor). Pure.

pipe      a stage's layers, a copy of a tied weight if another stage has the original, and batch norm statistics
tensor    one part per rank of a GPT's matrices, and of the biases of matrices that are split by outputs; norms,
          the position embedding, and the biases of layers that sum the parts are complete on every rank
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from muster.collectives_bench.cost.load import RankLoad, Split
from muster.collectives_bench.cost.modes import PredictedStage, TurnOrder, cut
from muster.jobs.models.anatomy import ModelOperation, TensorShape
from muster.jobs.models.counted import CountedAnatomy, CountedPart, CountedTensor

GOING: Final = 1  # messages in transit at a stage boundary, as in `pipe/wires/channels.py`
AHEAD: Final = 1  # receives posted in advance
BY_OUTPUTS: Final = ("query", "key", "value", "up", "head")  # layers whose biases are also split
WHOLE: Final = ("norm1", "norm2", "norm")
HANDS_ON_ALL: Final = (*WHOLE, "embed", "output", "down")  # layers whose complete output is on every rank
KEEPS_ALL: Final = (*WHOLE, "query", "up")  # layers that keep a norm's complete input or output


def stages_of(load: RankLoad, split: Split, schedule: TurnOrder | None) -> list[PredictedStage] | None:
    """Return each pipeline rank's part of the model (all of it without a pipeline); None if it cannot be cut."""
    if split.tensor > 1 and not (load.model.width or isinstance(load.model, CountedAnatomy)):
        return None
    if schedule is None:
        return [PredictedStage(load.model.parts, (load.model.parts[-1].outputs,))]
    return cut(load.model, schedule, split.pipe, split.stages)


def held_by(load: RankLoad, stage: PredictedStage, split: Split) -> RankLoad:
    """Return the load of this rank's tensors. Ranks with the same tensors average or shard them."""
    parts = tuple(_share(part, split.tensor) for part in (*stage.parts, *_copies(load, stage)))
    recorded = sum(t.elements for part in parts for t in part.tensors if load.model.buffers and _is(part, ("norm",)))
    return replace(load, model=replace(load.model, parts=parts, buffers=recorded), ranks=split.data, shards=None)


def kept_share(part: ModelOperation, split: Split, *, sequence: bool) -> float:
    """Return one rank's share of the tensors that a layer keeps for the backward."""
    if isinstance(part, CountedPart):
        return 1.0 / split.tensor if part.splits_kept or sequence else 1.0
    return 1.0 if _is(part, KEEPS_ALL) and not sequence else 1.0 / split.tensor


def handed_share(part: ModelOperation, split: Split) -> float:
    """Return one rank's share of a layer's output."""
    if isinstance(part, CountedPart):
        return 1.0 / split.tensor if part.splits_outputs else 1.0
    return 1.0 if _is(part, HANDS_ON_ALL) else 1.0 / split.tensor


def message_elements(load: RankLoad, stage: PredictedStage, split: Split) -> float:
    """Return the elements of one sample's messages that a stage holds in addition to its kept activations.

    One activation is being sent to the next stage, and one gradient to the previous stage. On CPUs,
    one more receive is posted in advance in each direction. A received gradient keeps its buffer until it is used.
    """
    ahead = 0 if load.backend == "nccl" else AHEAD
    return ((GOING + 1 + ahead) * stage.sent + (GOING + ahead) * stage.received) * passed_share(load, split)


def passed_share(load: RankLoad, split: Split) -> float:
    """Return one rank's share of an activation that passes between layers."""
    return 1.0 / split.tensor if load.sequence else 1.0


def _copies(load: RankLoad, stage: PredictedStage) -> Sequence[ModelOperation]:
    """List the head's copy of the embedding, if their weights are tied and the embedding is on another rank.

    For a user's model, list every parameter that the stage uses and another rank has.
    """
    if isinstance(load.model, CountedAnatomy):
        own = {tensor.name for part in stage.parts for tensor in part.tensors}
        shared = {each.name: (part, each) for part in stage.parts for each in _shared(part) if each.name not in own}
        return [replace(part, tensors=(each,), buffer_bytes=0) for part, each in shared.values()]
    here = {part.name for part in stage.parts}
    if "head" not in here or "embed" in here or not load.model.width:
        return ()
    head = next(part for part in stage.parts if part.name == "head")
    return () if head.tensors else (ModelOperation("head", "head", load.model.tensors[:1]),)


def _shared(part: ModelOperation) -> tuple[CountedTensor, ...]:
    return part.shared if isinstance(part, CountedPart) else ()


def _share(part: ModelOperation, ranks: int) -> ModelOperation:
    if ranks == 1 or (_is(part, WHOLE) and not isinstance(part, CountedPart)):
        return part
    return replace(part, tensors=tuple(_cut(part, tensor, ranks) for tensor in part.tensors))


def _cut(part: ModelOperation, tensor: TensorShape, ranks: int) -> TensorShape:
    """Return the shape of a rank's part of a tensor. The first dimension is always cut, because only sizes matter."""
    if isinstance(tensor, CountedTensor):
        return tensor.share(ranks)
    whole = tensor.name.endswith("position.weight") or (len(tensor.shape) == 1 and not _is(part, BY_OUTPUTS))
    first, *others = tensor.shape
    return tensor if whole else TensorShape(tensor.name, (-(-first // ranks), *others))


def _is(part: ModelOperation, names: Sequence[str]) -> bool:
    """Return True if the last word of a layer's name is in `names`.

    The name of a batch norm ends with a number, so it never matches.
    """
    last = part.name.rpartition(".")[2]
    return last in names or (names == ("norm",) and last.startswith("norm"))
