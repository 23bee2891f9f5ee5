"""Measure the layers of a job's model, in a process of the ranks' Python, so that this process needs no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.launch.bench.ranks_python import ask

if TYPE_CHECKING:
    from muster.collectives_bench.cost.advice.measured import LayerTimes
    from muster.jobs.spec.job import Job

TIMEOUT_S: Final = 600.0
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "compile": {"compile": True},
    "cuda_graph": {"cuda_graph": True},
    "activation_checkpointing": {"activation_checkpointing": True},
}


def measure(job: "Job", ranks: int, samples: Sequence[int], options: Sequence[str]) -> "LayerTimes":
    """Time passes of these sizes with up to `ranks` processes at once on this machine, about a minute.

    Raises:
        RefusedError: if the model cannot be built or timed, or the ranks' Python has no torch.
    """
    from muster.collectives_bench.cost.advice.measured import LayerTimes

    request = {
        "ranks": ranks,
        "samples": list(samples),
        "variants": {name: VARIANTS[name] for name in options},
        "threads": job.threads_per_rank if isinstance(job.threads_per_rank, int) else 1,
    }
    folder = job.workdir or str(Path.cwd())
    module, doing = "muster.jobs.train.timing.layers", "timing the model"
    record = ask(job, module, request, folder=folder, timeout_s=TIMEOUT_S, doing=doing)
    return LayerTimes.model_validate_json(json.dumps({**record, "muster_layers": 1}))
