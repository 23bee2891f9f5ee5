"""`muster bench norm`: time norms of rows of several widths beside a copy of the same rows."""

import argparse
from typing import Any, Final

from muster.jobs.timing.settings import NORMS, TimingSettings
from muster.launch.bench import choices, model
from muster.launch.bench.choices import Output, SectionOption, whole, word_list
from muster.launch.bench.model import each_of
from muster.launch.common.options import given

EPILOG: Final = """\
The norms of one width and precision take turns in one process. On a GPU, CUDA graphs of ten calls are timed, so the
host's work does not count. A norm that cannot run here shows the reason instead of a time.
"""
USUAL: Final[dict[str, Any]] = {
    "widths": [1024, 2048, 4096, 8192, 1000, 5000],
    "batch": 50_000,
    "precision": ["fp32", "bf16"],
    "warmup": 2,
    "steps": 20,
}


def _widths(text: str) -> list[int]:
    return [whole(word) for word in word_list(text)]


OWN: Final = (
    SectionOption("--norm", "model", each_of("norm", NORMS), "NAME,NAME", f"{', '.join(NORMS)}; default: all"),
    SectionOption("--width", "widths", _widths, "N,N", "elements of a row (default: 1024,2048,4096,8192,1000,5000)"),
    SectionOption("--rows", "batch", whole, "N", "rows of the input (default: 50000)"),
    SectionOption(
        "--pass",
        "passes",
        each_of("pass", ("forward", "backward")),
        "PASS,PASS",
        "forward, backward (includes the forward); default: both",
    ),
    SectionOption(
        "--precision",
        "precision",
        each_of("precision", ("fp32", "bf16", "fp16")),
        "P,P",
        "dtypes of input and weights: fp32, bf16, fp16 (default: fp32,bf16)",
    ),
    SectionOption("--warmup", "warmup", whole, "N", "untimed samples of each launch (default: 2)"),
    SectionOption("--steps", "steps", whole, "N", "timed samples of each launch (default: 20)"),
)
SHARED: Final = ("--launches", "--device", "--timeout", "--seed")
CHOICES: Final = (*OWN, *(choice for choice in model.CHOICES if choice.flag in SHARED))


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    choices.add(parser.add_argument_group("what is timed"), CHOICES, ())
    choices.add_measuring(parser, plot="bandwidth against width")


def run(args: argparse.Namespace) -> int:
    """Time every norm, then print the table; return the run's exit code, or 1 for a bad result."""
    from muster.launch.bench import measuring
    from muster.launch.submit.request import Request

    request, output = given(args, Request), given(args, Output)
    measuring.check(request, output)
    asked = choices.changes(vars(args), TimingSettings, CHOICES, (), usual=USUAL)
    return model.measure(request, output, ["norm", *asked.get("model", [])], asked)
