"""The rows of `gpu_throughput.py` for pipelines: a GPT in bfloat16, p stages on p GPUs, context 1024.

p-1f1b-8, p-1f1b-16   GPT medium, 4 sequences a micro-batch, 8 and 16 of them: 1F1B beside Schedule1F1B; reach
                      1.00 x with the same cut, 1.10 x cut by work
p-compiled            the same with every layer compiled on both sides, m = 8; stands beside
p-zb                  zero bubble, m = 8, beside ScheduleInterleavedZeroBubble and ScheduleZBVZeroBubble; reach
                      1.30 x, and 1.08 x our own 1F1B
p-xl                  GPT xl, 2 sequences a micro-batch, m = 8; reach 1.05 x
p-wires               p-1f1b-8 with messages over NCCL, of 1, 4 and 32 thread blocks, and by copy engines
p-memory              peaks of allocated memory of p-1f1b-8, the fullest GPU, of recorded sides what is reserved; reach
                      1.00 of PyTorch's
"""

from typing import Any

from gpu_rows import Row, side


def pipe(name: str, schedule: str, *options: tuple[str, Any], **more: Any) -> dict[str, Any]:
    """Spell a side of ours."""
    return side(name, "pipe", options=[("schedule", schedule), *options], precision="pure_bf16", **more)


def theirs(name: str, **more: Any) -> dict[str, Any]:
    """Spell a side of PyTorch's."""
    return side(name, "torch pipe", options=[("schedule", name.removesuffix(", compiled"))], **more)


WORK, GRAPHS = ("cut", "work"), ("cuda_graphs", True)
EAGER = pipe("1f1b eager", "1f1b")
SAME_CUT = pipe("1f1b", "1f1b", GRAPHS)
OWN_CUT = pipe("1f1b, by work", "1f1b", WORK, GRAPHS, held=True)
BESIDE = {**OWN_CUT, "held": False}
SIDES = (theirs("torch 1f1b"), EAGER, SAME_CUT, OWN_CUT)
SAME = (("1f1b", "torch 1f1b", 1.00), ("1f1b eager", "torch 1f1b", 1.00))
PIPE_ROWS = {
    "p-1f1b-8": Row("gpt-medium", (4,), SIDES, 1.10, microbatches=8, claims=SAME),
    "p-1f1b-16": Row("gpt-medium", (4,), SIDES, 1.10, microbatches=16, claims=SAME),
    "p-wires": Row(
        "gpt-medium",
        (4,),
        (
            theirs("torch 1f1b"),
            *(pipe(f"nccl {ctas}", "1f1b", GRAPHS, ("ctas", ctas)) for ctas in (1, 4, 32)),
            {**SAME_CUT, "held": True},
        ),
        1.00,
        microbatches=8,
    ),
    "p-compiled": Row(
        "gpt-medium",
        (4,),
        (
            theirs("torch 1f1b, compiled", compiled="blocks"),
            pipe("1f1b eager", "1f1b", compiled="blocks"),
            pipe("1f1b, by work", "1f1b", WORK, GRAPHS, compiled="blocks", held=True),
        ),
        1.10,
        microbatches=8,
    ),
    "p-zb": Row(
        "gpt-medium",
        (4,),
        (
            theirs("torch zb"),
            theirs("torch zbv"),
            pipe("zb1p, by work", "zb1p", WORK, GRAPHS),
            pipe("zbv, by work", "zbv", WORK, GRAPHS, held=True),
            BESIDE,
        ),
        1.30,
        microbatches=8,
        claims=(("zbv, by work", "1f1b, by work", 1.08), ("zb1p, by work", "1f1b, by work", 1.08)),
    ),
    "p-xl": Row("gpt-xl", (2,), (theirs("torch 1f1b"), EAGER, OWN_CUT), 1.05, microbatches=8),
    "p-memory": Row(
        "gpt-medium",
        (4,),
        (theirs("torch 1f1b"), {**EAGER, "held": True}, SAME_CUT, pipe("zbv, by work", "zbv", WORK, GRAPHS)),
        1.00,
        what="memory",
        microbatches=8,
    ),
}
