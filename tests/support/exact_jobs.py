"""The settings of a small training whose bits do not depend on the number of ranks.

Its steps wait more than they compute, so that there is time to kill a rank, and for another one to join.
"""

from pathlib import Path
from typing import Any, Final

STEPS: Final = 30
GPT: Final = {"d_model": 32, "d_ff": 64, "layers": 1, "heads": 2, "context": 32, "dropout": 0.1}


def tokens(pause_s: float) -> dict[str, Any]:
    """Return a `data:` section with random tokens; reading a sample takes `pause_s`."""
    make = f"{Path(__file__).with_name('paced_tokens.py')}:sets"
    return {"make": make, "args": {"context": 32, "vocabulary": 64, "pause_s": pause_s}}


TRAIN: Final[dict[str, Any]] = {
    "model": {**GPT, "vocabulary": 64},
    "data": tokens(pause_s=0.06),
    "mode": "flat",
    "exact": True,
    "virtual_ranks": 12,
    "batch_size": 24,
    "steps": STEPS,
    "log_every": 1,
    "evaluate": False,
    "optimizer": {"name": "adamw", "lr": 1e-3},
}
