"""Check by arithmetic that the parts of a tensor cover each element exactly once, without visiting elements."""

from collections.abc import Sequence
from typing import Final

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint.pieces import Piece, Range

MAX_COMPARISONS: Final = 1_000_000  # maximum pairs of boxes to compare; even thousands of columns need far fewer


def check_coverage(name: str, pieces: Sequence[Piece], where: object) -> None:
    """Check that the pieces of one tensor contain each of its elements exactly once.

    If the element counts add up to the tensor's and no two pieces overlap, no element is missing.

    Raises:
        BadCheckpointError: if an element is missing or stored twice, or flat ranges are mixed with boxes that are not
            contiguous.
    """
    wanted, found = pieces[0].tensor_elements, sum(piece.elements for piece in pieces)
    if found != wanted:
        raise BadCheckpointError(f"{where}: {name:.80}: its parts have {found} of {wanted} elements")
    if wanted == 0 or len(pieces) == 1:
        return
    if any(piece.elements == 0 for piece in pieces):
        raise BadCheckpointError(f"{where}: {name:.80}: a part is empty")
    if (flat := _as_flat(pieces)) is not None:
        _check_flat(name, flat, where)
    elif all(piece.flat is None for piece in pieces):
        _check_boxes(name, [_box_of(piece) for piece in pieces], where)
    else:
        raise BadCheckpointError(f"{where}: {name:.80}: flat ranges are mixed with boxes that are not contiguous")


def _as_flat(pieces: Sequence[Piece]) -> list[Range] | None:
    """Return the pieces as flat ranges if each is one contiguous run, else None."""
    runs = [piece.runs() for piece in pieces]
    return [each[0] for each in runs] if all(len(each) == 1 for each in runs) else None


def _check_flat(name: str, ranges: list[Range], where: object) -> None:
    at = 0
    for start, stop in sorted(ranges):
        if start != at:
            raise BadCheckpointError(
                f"{where}: {name:.80}: elements {min(at, start)} to {max(at, start)} are missing or stored twice"
            )
        at = stop


def _check_boxes(name: str, boxes: list[tuple[Range, ...]], where: object) -> None:
    """Check that no two boxes overlap, by a sweep along the dimension with the most distinct ranges.

    The sweep compares only boxes that overlap in that dimension.
    """
    axis = max(range(len(boxes[0])), key=lambda each: len({box[each] for box in boxes}))
    active: list[tuple[Range, ...]] = []
    comparisons = 0
    for box in sorted(boxes, key=lambda each: each[axis]):
        active = [each for each in active if each[axis][1] > box[axis][0]]
        comparisons += len(active)
        if comparisons > MAX_COMPARISONS:
            raise BadCheckpointError(f"{where}: {name:.80}: {len(boxes)} boxes are too many to compare")
        for other in active:
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(box, other, strict=True)):
                raise BadCheckpointError(f"{where}: {name:.80}: two parts have the same elements")
        active.append(box)


def _box_of(piece: Piece) -> tuple[Range, ...]:
    return piece.box if piece.box is not None else tuple((0, size) for size in piece.shape)
