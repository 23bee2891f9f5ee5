"""The rows of `gpu_throughput.py`: which sides train which model, and what is to be reached.

A side is spelt as `gpu_sides.Spec` has it. Of PyTorch's sides the fastest counts; `held` says which of ours does.
Rows a to h are described in `gpu_throughput.py`. Pipelines are of a GPT in bfloat16, p stages on p GPUs, context 1024:

s-small               GPT small as a job file has it (context 128), 16 sequences a GPU, bf16, otherwise defaults: steps
                      replayed from CUDA graphs beside eager ones and beside torch.compile(mode="reduce-overhead")
x-xl                  GPT xl on one GPU, pure_bf16 and compiled, beside eager autocast; reach 1.30 x
p-1f1b-8, p-1f1b-16   GPT medium, 4 sequences a micro-batch, 8 and 16 of them: 1F1B beside Schedule1F1B; reach
                      1.00 x with the same cut, 1.10 x cut by work
p-compiled            the same with every layer compiled on both sides, m = 8; stands beside
p-zb                  zero bubble, m = 8, beside ScheduleInterleavedZeroBubble and ScheduleZBVZeroBubble; reach
                      1.30 x, and 1.08 x our own 1F1B
p-xl                  GPT xl, 2 sequences a micro-batch, m = 8; reach 1.05 x
p-wires               p-1f1b-8 with messages over NCCL, of 1, 4 and 32 thread blocks, and by copy engines
p-2-copies            p-1f1b-8 as two pipelines on half of the GPUs each; zero bubbles too; reach as there
p-memory              peaks of allocated memory of p-1f1b-8, the fullest GPU, of recorded sides what is reserved; reach
                      1.00 of PyTorch's
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the claim."""

    model: str
    batches: tuple[int, ...]  # a GPU; the next one where memory does not suffice
    specs: tuple[dict[str, Any], ...]
    reach: float
    what: str = "speed"  # or memory: the peak; or states: what is held between two steps, over the formula
    ceiling: bool = False
    limit_s: float = 300.0
    stock: bool = False  # True: the shape that a model's name alone stands for
    microbatches: int = 0  # of a step of a pipeline; its `batches` count the samples of one micro-batch
    copies: int = 1  # of the pipeline; their gradients are averaged
    claims: tuple[tuple[str, str, float], ...] = ()  # beside `reach`: side, other side, times as fast


def side(name: str, kind: str, **more: Any) -> dict[str, Any]:
    """Spell a side of `gpu_sides.Spec`."""
    return {"name": name, "kind": kind, "options": [], "numerics": [], **more}


def sized(name: str, kind: str, size_mb: float | None, **more: Any) -> dict[str, Any]:
    """Spell a side of ours with buckets of a size."""
    return side(name, kind, options=[("bucket_size_mb", size_mb)], **more)


def engine(name: str, mode: str, **more: Any) -> dict[str, Any]:
    """Spell a side of our engine in a mode, with large buckets."""
    return side(name, "engine", options=[("mode", mode), ("bucket_size_mb", LARGE_MB)], **more)


LARGE_MB = 100.0  # between GPUs of one host every launch beside a matrix product costs, so few and large ones are best
TORCH = side("torch ddp", "torch", precision="bf16")
BUCKETED = side("bucketed", "bucketed", precision="bf16", held=True)
FP32 = {"precision": "fp32"}
PURE = {"precision": "pure_bf16"}
BLOCKS = {"compiled": "blocks", **PURE}
OFF, ON = {"graph": False}, {"graph": "auto"}  # of an engine: cuda_graph; auto is the default of a job file
ZERO1 = side("zero1", "zero1", held=True)
TORCH_ZERO = side("torch zero", "torch zero")
# All compute in bfloat16 with float32 masters. fully_shard sums gradients in bfloat16, as ours, or in float32.
FSDP = side("torch fsdp", "torch fsdp", **PURE)
ZERO3 = side("zero3", "zero3", held=True, **PURE)
FLAT = ("communication_dtype", "bf16")  # the gradients' own, but cast gradients are sent from flat tensors
ALL_BUT_EMBEDDING_MB = 236.5  # of GPT small in bfloat16: two launches, the first beside the embedding's own backward
ROWS = {
    "a": Row(
        "gpt-small",
        (32, 16),
        (
            side("torch compile, ddp", "torch", compiled="whole"),
            side("torch ddp, compile", "torch", compiled="inside"),
            sized("ours", "engine", None, held=True, **BLOCKS, **ON),
            sized("ours eager", "engine", None, **BLOCKS),
            side("ours 25 MB", "engine", **BLOCKS, **ON),
            sized("ours 100 MB", "engine", LARGE_MB, **BLOCKS, **ON),
            sized("ours embedding apart", "engine", ALL_BUT_EMBEDDING_MB, **BLOCKS, **ON),
            sized("ours whole", "engine", None, numerics=[("whole", True)], **BLOCKS, **ON),
            side("torch alone", "torch", compiled="whole", alone=True),
            side("ours alone", "engine", alone=True, **BLOCKS, **ON),
            side("ours apart", "engine", apart=True, **BLOCKS, **ON),
            # Fewer thread blocks for NCCL leave more of the GPU to the backward; more of them send faster after it.
            *(sized(f"ours {ctas} ctas", "engine", None, ctas=ctas, **BLOCKS) for ctas in (4, 8, 32, 64)),
            *(sized(f"ours 100 MB {ctas} ctas", "engine", LARGE_MB, ctas=ctas, **BLOCKS, **ON) for ctas in (4, 8)),
            # One message of copied gradients instead of a group of all gradients where they are.
            side("ours flat", "engine", options=[("bucket_size_mb", None), FLAT], **BLOCKS),
            side("ours flat 100 MB", "engine", options=[("bucket_size_mb", LARGE_MB), FLAT], **BLOCKS),
            # Sharded optimizers: three quarters of the update are not computed, and gathers run beside the forward.
            engine("ours zero1", "zero1", **BLOCKS, **ON),
            engine("ours zero1 eager", "zero1", **BLOCKS),
            engine("ours zero2", "zero2", **BLOCKS, **ON),
        ),
        1.15,
        ceiling=True,
        limit_s=480.0,
        claims=(("ours alone", "torch alone", 1.12), ("ours", "ours alone", 0.97)),
    ),
    "a-tweaked": Row(
        "gpt-small",
        (32, 16),
        (
            side("torch all bf16", "torch", compiled="whole", **PURE),
            sized("ours", "engine", None, held=True, **BLOCKS),
        ),
        1.0,
    ),
    "b-medium": Row(
        "gpt-medium",
        (16, 8, 4),
        (
            TORCH,
            side("torch 100 MB", "torch", options=[("bucket_cap_mb", 100)]),
            sized("bucketed", "engine", LARGE_MB, held=True, **ON),
            side("bucketed 25 MB", "engine", **ON),
            sized("bucketed eager", "engine", LARGE_MB, **OFF),
            sized("wrapper", "bucketed", LARGE_MB),  # the same loop as PyTorch's, with our wrapper alone
            sized("ours pure_bf16", "engine", LARGE_MB, **PURE),
        ),
        1.05,
    ),
    "b-xl": Row("gpt-xl", (8, 4, 2), (TORCH, sized("bucketed", "bucketed", LARGE_MB, held=True)), 1.02),
    "b-xl-best": Row(
        "gpt-xl", (8, 4, 2), (TORCH, sized("ours pure_bf16", "engine", LARGE_MB, held=True, **PURE)), 1.02
    ),
    "c": Row(
        "vgg11",
        (128,),
        (
            side("torch ddp", "torch", **FP32),
            side("bucketed", "bucketed", **FP32),
            side("ours", "engine", **FP32),
            side("torch ddp bf16", "torch", precision="bf16"),
            side("ours graph", "engine", graph=True, held=True, **FP32),
        ),
        1.5,
    ),
    "c-bf16": Row(
        "vgg11",
        (128,),
        (
            side("torch ddp bf16", "torch", precision="bf16"),
            side("ours graph bf16", "engine", graph=True, held=True, precision="bf16"),
        ),
        1.5,
    ),
    "d-gpt": Row("gpt-small", (16, 8), (TORCH, BUCKETED), 1.0, what="memory"),
    "d-vgg": Row(
        "vgg11",
        (128,),
        (side("torch ddp", "torch", **FP32), side("bucketed", "bucketed", held=True, **FP32)),
        1.0,
        what="memory",
    ),
    "e-medium": Row(
        "gpt-medium",
        (16, 8, 4),
        (
            TORCH_ZERO,
            side("torch zero 100 MB", "torch zero", options=[("bucket_cap_mb", 100)]),
            engine("zero1", "zero1", held=True, **ON),
            engine("zero1 eager", "zero1", **OFF),
            engine("zero2", "zero2", **ON),
            sized("wrapper", "zero1", LARGE_MB),
            sized("zero1 pure_bf16", "zero1", LARGE_MB, **PURE),
        ),
        1.08,
    ),
    "e-xl": Row(
        "gpt-xl",
        (8, 4, 2),
        (TORCH_ZERO, engine("zero1", "zero1", held=True, **ON), sized("wrapper", "zero1", LARGE_MB)),
        1.10,
    ),
    "e-xl-best": Row(
        "gpt-xl", (8, 4, 2), (TORCH_ZERO, sized("zero1 pure_bf16", "zero1", LARGE_MB, held=True, **PURE)), 1.10
    ),
    "f-medium": Row(
        "gpt-medium",
        (16, 8, 4),
        (
            FSDP,
            side("torch fsdp, fp32 sums", "torch fsdp", options=[("reduce", "float32")], **PURE),
            ZERO3,
            side("zero3, kept", "zero3", options=[("reshard_after_forward", False)], **PURE),
        ),
        1.05,
    ),
    "f-xl": Row("gpt-xl", (8, 4, 2), (FSDP, ZERO3), 1.05),
    "g-zero1-medium": Row("gpt-medium", (16, 8), (TORCH_ZERO, ZERO1), 1.0, what="memory"),
    "g-zero1-xl": Row("gpt-xl", (8, 4), (TORCH_ZERO, ZERO1), 1.0, what="memory"),
    "g-zero3-medium": Row("gpt-medium", (16, 8), (FSDP, ZERO3), 1.0, what="memory"),
    "g-zero3-xl": Row("gpt-xl", (8, 4), (FSDP, ZERO3), 1.0, what="memory"),
    "h": Row("gpt-2.7b", (16,), (FSDP, ZERO3), 1.05, what="states", stock=True),
}
# Rows of small steps: 16 sequences of 128 tokens a GPU, where the host, not the GPU, limits an eager step.
EAGER_DDP = side("ddp", "engine", options=[("mode", "ddp")], **OFF)
ROWS |= {
    "s-small": Row(
        "gpt-small",
        (16,),
        (
            EAGER_DDP,
            side("torch overhead, ddp", "torch", compiled="overhead"),
            side("torch ddp, overhead", "torch", compiled="overhead inside"),
            side("bucketed eager", "engine", **OFF),
            side("zero1 eager", "engine", options=[("mode", "zero1")], **OFF),
            side("bucketed", "engine", held=True, **ON),
            side("zero1", "engine", options=[("mode", "zero1")], **ON),
            side("zero2", "engine", options=[("mode", "zero2")], **ON),
        ),
        1.00,
        stock=True,
        claims=(("bucketed", "ddp", 4.0), ("zero1", "ddp", 3.0), ("zero2", "ddp", 3.0)),
    ),
}
ROWS["x-xl"] = Row(
    "gpt-xl",
    (8, 4, 2),
    (
        side("torch alone", "torch", alone=True),
        side("ours alone", "engine", alone=True, held=True, **BLOCKS, **ON),
        side("ours alone not compiled", "engine", alone=True, **PURE, **ON),
    ),
    1.30,
    claims=(("ours alone", "torch alone", 1.30),),
)


def scaling(model: str, batch: int) -> Row:
    """Return a row that compares the speed per GPU of four modes with the speed of one GPU."""
    modes = ("zero1", "zero3", "fsdp")
    sides = (
        side("torch fsdp", "torch fsdp", **BLOCKS),
        side("ours alone", "engine", alone=True, **BLOCKS, **ON),
        side("ours apart", "engine", apart=True, **BLOCKS, **ON),
        sized("bucketed", "engine", None, held=True, **BLOCKS, **ON),
        *(engine(mode, mode, **BLOCKS, **ON) for mode in modes),
    )
    claims = tuple((mode, "ours alone", 0.97) for mode in ("bucketed", *modes))
    return Row(model, (batch, batch // 2), sides, 1.0, claims=claims)


ROWS |= {f"w-{size}": scaling(f"gpt-{size}", batch) for size, batch in (("small", 32), ("medium", 16), ("xl", 8))}

# What `--short` measures: the rows that are held to a reach on two GPUs, with the sides that count. (): all.
SHORT: dict[str, tuple[str, ...]] = {
    "s-small": (),
    "a": ("torch compile, ddp", "torch alone", "ours alone", "ours apart", "ours", "ours 100 MB 8 ctas", "ours zero1"),
    "b-medium": ("torch ddp", "torch 100 MB", "bucketed"),
    "e-medium": ("torch zero", "torch zero 100 MB", "zero1"),
    "x-xl": ("torch alone", "ours alone"),
    "e-xl": ("torch zero", "zero1"),
    "p-1f1b-8": ("torch 1f1b", "1f1b eager", "1f1b, by work"),
}


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
SAME = (("1f1b", "torch 1f1b", 1.00), ("1f1b eager", "torch 1f1b", 1.03))
ROWS |= {
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
    "p-2-copies": Row(
        "gpt-medium",
        (4,),
        (
            theirs("torch 1f1b"),
            theirs("torch 1f1b, late"),
            theirs("torch zb"),
            EAGER,
            OWN_CUT,
            pipe("zb1p, by work", "zb1p", WORK, GRAPHS),
        ),
        1.10,
        microbatches=8,
        copies=2,
        claims=(("1f1b eager", "torch 1f1b", 1.03), ("zb1p, by work", "torch zb", 1.30)),
    ),
}
