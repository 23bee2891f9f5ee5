"""The job that the faults hit: a very small GPT with dropout and AdamW, the same bits on 1, 2 and 4 ranks."""

import json
from typing import Any

MODEL = {"d_model": 32, "d_ff": 64, "layers": 1, "heads": 2, "context": 32, "dropout": 0.1}


def job(
    *,
    nodes: int = 2,
    ranks: int = 1,
    steps: int = 100,
    every: int = 10,
    train: dict[str, Any] | None = None,
    restart: dict[str, Any] | None = None,
    **keys: Any,
) -> str:
    """Return a job file: `nodes` x `ranks`, a save `every` so many steps, and what else is given."""
    described = {
        "name": "chaos",
        "nodes": nodes,
        "ranks_per_node": ranks,
        "grace_s": 1.0,
        "train": {
            "model": MODEL,
            "data": "synthetic",
            "mode": "allreduce",
            "exact": True,
            "virtual_ranks": 4,
            "batch_size": 16,
            "steps": steps,
            "log_every": 2,
            "evaluate": False,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            **(train or {}),
        },
        "checkpoint": {"every_steps": every},
        "restart": {"max": 5, "min_nodes": 1, "backoff": 0.1, **(restart or {})},
        **keys,
    }
    return json.dumps(described, indent=2) + "\n"
