"""Write what a session logs for TensorBoard, into `<run>/tensorboard`."""

from collections.abc import Callable
from pathlib import Path

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.log import OWN, News


def writer(run: Path) -> Callable[[News], None]:
    """Return what writes the rows of a run.

    Raises:
        RefusedError: this Python has no tensorboard.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RefusedError(
            "session: tensorboard=True needs the package tensorboard; install it, or leave it out"
        ) from error
    events = SummaryWriter(str(run / "tensorboard"))

    def show(news: News) -> None:
        for row in news.rows:
            for name, value in row.items():
                if value is not None and (name not in OWN or name in ("rate", "step_s")) and not isinstance(value, str):
                    events.add_scalar(name, value, row["step"])
        events.flush()

    return show
