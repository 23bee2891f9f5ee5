"""The rows of `memory-RRRRR.jsonl`, in which a rank records its memory for `muster memory RUN`.

    {"point": "baseline", "rank": 0, "world_size": 2, "attempt": 0, "mode": "zero1", "device": "cpu", "host": ...,
     "first": 0, "now": {...}}                                    before the model was built
    {"point": "init", "held": {...}, "now": {...}, "peak": {...}}      model, wrapper and optimizer exist
    {"point": "before_step", "step": 1, "held": ..., "now": ..., "peak": ...}    gradients are synchronized
    {"point": "after_step", "step": 1, "held": ..., "now": ..., "peak": ...}     the optimizer has stepped
    ...                                                           the same for the first steps of the attempt
    {"point": "end", "now": {...}, "peak": {...}}                 `peak`: maximum since the baseline

held    bytes of storages by kind: parameters, gradients, optimizer, buffers; a storage of several kinds counts once,
        as the first of them
now     bytes: "rss": resident memory, "files": its part in pages of files, such as libraries; on a GPU also the
        allocator's "allocated" and "reserved"
peak    the maximum of each value in `now` except "files", since the previous point
used    rows of steps on CPUs only: the peak number of bytes allocated on the heap, sampled when gradients arrive,
        relative to the baseline
graphs  the last row on GPUs only, if steps were replayed from CUDA graphs: bytes reserved for the graphs alone

Each row is written immediately, so the rows of a killed rank are kept.
"""

from typing import Final

KINDS: Final = ("parameters", "gradients", "optimizer", "buffers")
BASELINE: Final = "baseline"
INIT: Final = "init"
BEFORE: Final = "before_step"
AFTER: Final = "after_step"
END: Final = "end"
