"""What of a `train:` section does not go with layers that are split over ranks (tensor parallel), and why.

heads, d_ff, vocabulary     each rank has as many of each, so the degree divides them
context                     too, where sequences are split between the layers (`sequence_parallel`)
"""

import math
from typing import TYPE_CHECKING

from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.model_shape import resolve_shape
from muster.jobs.models.shapes import GptShape
from muster.jobs.spec.modes import Parallel

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


def why_not_split(settings: "TrainSettings") -> str | None:
    """Return why layers cannot be split under these settings, and what to do; None when they can, or are not."""
    if not settings.splits_layers:
        return None
    if settings.model.is_vgg:
        return (
            f"model: {settings.model.name}: tensor parallel splits the layers of a gpt, of a vgg it has no plan; "
            "choose a gpt, or a data-parallel mode"
        )
    if settings.exact:
        return (
            "exact: true does not go with tensor parallel: the parts of a product are added in another order than one "
            "process adds them; set exact: false, or choose another mode"
        )
    if settings.zero == 3:
        return (
            f"zero: 3 by sync: {settings.sync} does not go with tensor parallel, which splits parameters over ranks "
            "itself; zero 0, 1 and 2 do"
        )
    return None


def check_tensor(settings: "TrainSettings", parallel: Parallel) -> None:
    """Refuse a model whose layers cannot be split over so many ranks: before any rank is started.

    Raises:
        RefusedError: the ranks do not divide heads, d_ff, vocabulary or context; the message names those that would.
    """
    shape = resolve_shape(settings.model, settings.model.vocabulary or GptShape.vocabulary)
    assert isinstance(shape, GptShape)
    sizes = {"heads": shape.heads, "d_ff": shape.d_ff, "vocabulary": shape.vocabulary}
    if settings.sequence_parallel:
        sizes["context"] = shape.context
    ranks = parallel.tensor
    wrong = [f"{what} {size} ({size % ranks} left)" for what, size in sizes.items() if size % ranks]
    if not wrong:
        return
    common = math.gcd(*sizes.values())
    degrees = [str(each) for each in range(2, common + 1) if common % each == 0]
    where = "train.mode: tensor" if settings.parallel is None else f"train.parallel: tensor {ranks}"
    could = f"use {' or '.join(degrees)} of them, which divide" if degrees else "no number of them divides"
    raise RefusedError(
        f"{where}: {ranks} ranks do not divide {', '.join(wrong)}; "
        f"{could} {', '.join(f'{what} {size}' for what, size in sizes.items())}"
    )
