"""The settings of a small training whose bits do not depend on the number of ranks."""

from typing import Any, Final

STEPS: Final = 60
TRAIN: Final[dict[str, Any]] = {
    "model": {"d_model": 32, "d_ff": 64, "layers": 1, "heads": 2, "context": 32, "dropout": 0.1},
    "data": "synthetic",
    "mode": "allreduce",
    "exact": True,
    "virtual_ranks": 12,
    "batch_size": 24,
    "steps": STEPS,
    "log_every": 1,
    "evaluate": False,
    "optimizer": {"name": "adamw", "lr": 1e-3},
}
