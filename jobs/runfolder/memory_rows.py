"""The rows of `memory-RRRRR.jsonl`: the memory of a rank, written by the rank, read by `muster memory RUN`.

    {"point": "baseline", "rank": 0, "world_size": 2, "attempt": 0, "mode": "zero1", "device": "cpu", "host": ...,
     "first": 0, "now": {...}}                                    before the model was built
    {"point": "init", "held": {...}, "now": {...}, "peak": {...}}      model, wrapper and optimizer exist
    {"point": "before_step", "step": 1, "held": ..., "now": ..., "peak": ...}    gradients are synchronized
    {"point": "after_step", "step": 1, "held": ..., "now": ..., "peak": ...}     the optimizer has stepped
    ...                                                           the same for the first steps of the attempt
    {"point": "end", "now": {...}, "peak": {...}}                 `peak`: maximum since the baseline

held    bytes of storages by kind: parameters, gradients, optimizer, buffers; each storage once, in the first kind
now     {"rss": in RAM, "files": the part of it in pages of libraries}; on a GPU also the allocator's "allocated" and
        "reserved"
peak    the same without files: the maximum since the previous point
used    rows of steps on CPUs only: the peak number of bytes allocated on the heap, sampled when gradients arrive,
        relative to the baseline

Each row is appended at once, so the rows of a killed rank are kept.
"""

from typing import Final

KINDS: Final = ("parameters", "gradients", "optimizer", "buffers")
BASELINE: Final = "baseline"
INIT: Final = "init"
BEFORE: Final = "before_step"
AFTER: Final = "after_step"
END: Final = "end"
