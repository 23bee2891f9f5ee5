"""`muster bench model`: time models alone (forward, backward, whole steps), on this machine or a cluster's node."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.basics.words import unknown
from muster.jobs.spec.train_fields import Precision
from muster.jobs.timing.settings import NAMES, OF_TRAIN, Pass, TimingSettings
from muster.launch.bench import choices
from muster.launch.bench.choices import Output, SectionOption, Switch, number, whole, word_list
from muster.launch.bench.loads import train_job
from muster.launch.common.options import given
from muster.launch.common.program_words import COMMAND_LINE

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job

EPILOG: Final = """\
The timed work is what train: would run on one rank: its model, loss, precision and optimizer (AdamW), on a random
batch. Each launch of a row runs in its own process. A row that runs out of memory or time shows the reason
instead of a time. The exit code is 1 if a row failed, or if no row has a time.
"""


def each_of(what: str, valid: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser for lists of words from `valid`. Its error suggests the most similar valid word."""

    def read(text: str) -> list[str]:
        if wrong := [word for word in word_list(text) if word not in valid]:
            raise ValueError(unknown(what, wrong[0], tuple(valid)))
        return word_list(text)

    return read


AGAIN: Final = ("activation_checkpointing", "activation_checkpointing")
OF_JOB: Final = {  # {field of TimingSettings: the key of train: that gives its default}
    "batch": "batch_size",
    "precision": "precision",
    "compile": "compile",
    "activation_checkpointing": "activation_checkpointing",
    "device": "device",
    "seed": "seed",
}
CHOICES: Final = (
    SectionOption("--model", "model", word_list, "NAME,NAME", "such as gpt-small,vgg11, one row each; or all"),
    SectionOption(
        "--pass",
        "passes",
        each_of("pass", get_args(Pass)),
        "PASS,PASS",
        "forward, backward (includes the forward), step (a whole step); default: all three",
    ),
    SectionOption(
        "--precision",
        "precision",
        each_of("precision", get_args(Precision)),
        "P,P",
        "fp32 (default), bf16, fp16, pure_bf16, fp64",
    ),
    SectionOption("--warmup", "warmup", whole, "N", "untimed steps at the start of each launch (default: 1)"),
    SectionOption("--steps", "steps", whole, "N", "timed steps of each launch (default: 2)"),
    SectionOption(
        "--launches",
        "launches",
        whole,
        "N",
        "fresh processes per row; compare treats each as one observation (default: 3)",
    ),
    SectionOption("--batch", "batch", whole, "N", "samples per batch (default: 16)"),
    SectionOption("--context", "context", whole, "N", "GPTs only: tokens per sample (default: 128)"),
    SectionOption("--vocabulary", "vocabulary", whole, "N", "GPTs only: size of the vocabulary (default: 10000)"),
    SectionOption("--norm", "norm", str, "NAME", "GPTs only: normalization, rms (default), rms_fused or layer"),
    SectionOption("--device", "device", str, "NAME", "auto (default), cpu, cuda"),
    SectionOption(
        "--timeout", "timeout_s", number, "S", "time limit in seconds for one launch of a row (default: 300)"
    ),
    SectionOption("--seed", "seed", whole, "N", "seed of the model and its batch (default: 0)"),
)
SWITCHES: Final = (
    Switch("--compile", "compile", True, "apply torch.compile to each block"),
    Switch(
        "--activation-checkpointing", "activation_checkpointing", True, "recompute every block in the backward pass"
    ),
    Switch("--bias", "bias", True, "GPTs only: give linear layers biases"),
    Switch("--untied", "tied", False, "GPTs only: give the head its own weight instead of the embedding's"),
    Switch("--dtypes", "dtypes", True, "show the types that autocast chooses for each layer, instead of times"),
    Switch("--no-matmul", "matmul", False, "skip the matrix product that is timed as a reference"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "trained",
        metavar="JOB",
        nargs="?",
        help="a train: job whose model is timed, with its data, loss and optimizer",
    )
    choices.add(parser.add_argument_group("what is timed"), CHOICES, SWITCHES)
    choices.add_measuring(parser, plot="the time of every row")


def run(args: argparse.Namespace) -> int:
    """Time every row, then print the table; return the run's exit code, or 1 for a bad result."""
    from muster.launch.bench import measuring
    from muster.launch.bench.model_view import ModelView
    from muster.launch.common.host import visible_gpus
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request

    request, output = given(args, Request), given(args, Output)
    measuring.check(request, output)
    if args.model is None and args.trained is None:
        raise UsageError(f"--model: is missing; name some of {', '.join(NAMES)}, or all, or give a train: job")
    job = None if args.trained is None else _timeable(args.trained)
    asked = _asked(args, job)
    words, of_job = ["model", *asked.get("model", [])], dict[str, Any]()
    if job is not None:
        words, of_job = [*words, job.name], {"workdir": job.workdir or str(Path.cwd()), "env": dict(job.env)}
    text = choices.job_text(words, threads_per_rank="auto", timing=asked, **of_job)
    prepared = prepare(replace(request, job=COMMAND_LINE, job_text=text))
    if asked.get("device") == "cuda" and prepared.submission.route.is_here and not visible_gpus():
        raise RefusedError("--device: cuda: this machine has no GPU; name a host that has one (-w HOST), or use cpu")
    return measuring.measure([measuring.PreparedWorld("", prepared)], ModelView, output)


def _timeable(path: str) -> "Job":
    """Load the job whose model is to be timed.

    Raises:
        JobFileError: if the file is invalid.
        RefusedError: if the job does not train, or sets `python:`.
    """
    job = train_job(path, ())
    if job.python is not None:
        raise RefusedError(
            f"{path}: python: muster bench model runs in Muster's own Python; remove python: from the job"
        )
    return job


def _asked(args: argparse.Namespace, job: "Job | None") -> dict[str, Any]:
    """Return the settings from the options and the job; options take precedence."""
    if job is None:
        return choices.changes(vars(args), TimingSettings, CHOICES, SWITCHES)
    section: dict[str, Any] = job.settings.model_dump(mode="json", exclude_unset=True)
    own = SectionOption("JOB", "train", lambda path: {key: section[key] for key in OF_TRAIN if key in section}, "", "")
    asked = choices.changes({**vars(args), "JOB": args.trained}, TimingSettings, (own, *CHOICES), SWITCHES)
    return {key: section[given] for key, given in OF_JOB.items() if given in section} | asked
