"""What a rank says of its memory, as rows of `memory-RRRRR.jsonl`: written by the rank, read by `muster memory RUN`.

    {"point": "baseline", "rank": 0, "world_size": 2, "attempt": 0, "mode": "zero1", "device": "cpu", "host": ...,
     "first": 0, "now": {...}}                                    before the model was made
    {"point": "init", "held": {...}, "now": {...}, "peak": {...}}      model, wrapper and optimizer are there
    {"point": "before_step", "step": 1, "held": ..., "now": ..., "peak": ...}    gradients are synchronized
    {"point": "after_step", "step": 1, "held": ..., "now": ..., "peak": ...}     the optimizer has stepped
    ...                                                           the same of the first steps of the attempt
    {"point": "end", "now": {...}, "peak": {...}}                 `peak`: the most since the baseline

held    bytes of storages by kind: parameters, gradients, optimizer, buffers; each storage once, in the first kind
now     {"rss": in RAM, "files": of that, pages of libraries}; on a GPU the allocator's "allocated" and "reserved" too
peak    the same but files: the most since the point before
used    on CPUs, of rows of steps: the most that the heap had handed out when gradients came since the point before,
        from the baseline on

A row is appended when it is known: what a rank that was killed had said is there.
"""

from typing import Final

KINDS: Final = ("parameters", "gradients", "optimizer", "buffers")
BASELINE: Final = "baseline"
INIT: Final = "init"
BEFORE: Final = "before_step"
AFTER: Final = "after_step"
END: Final = "end"
