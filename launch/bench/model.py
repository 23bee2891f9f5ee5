"""`muster bench model`: time models alone - forward, backward, whole steps - on this machine or on a cluster's node."""

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
from muster.launch.bench.choices import Choice, Output, Switch, number, whole, word_list
from muster.launch.bench.loads import train_job
from muster.launch.common.options import given
from muster.launch.common.program_words import COMMAND_LINE

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job

EPILOG: Final = """\
What is timed is what train: would run on one rank: its model, loss, numbers and optimizer (AdamW), on a random batch.
Each launch of a row has a process of its own. What does not fit in memory, or not in its time, is a row with the
reason. The exit code is 1 where a row failed, or none has a time.
"""


def _each_of(what: str, valid: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what reads words that must stand in a table, with the nearest one that does in the error."""

    def read(text: str) -> list[str]:
        if wrong := [word for word in word_list(text) if word not in valid]:
            raise ValueError(unknown(what, wrong[0], tuple(valid)))
        return word_list(text)

    return read


AGAIN: Final = ("activation_checkpointing", "activation_checkpointing")
OF_JOB: Final = {  # settings, with the key of a train: section that is their default
    "batch": "batch_size",
    "precision": "precision",
    "compile": "compile",
    "activation_checkpointing": "activation_checkpointing",
    "device": "device",
    "seed": "seed",
}
CHOICES: Final = (
    Choice("--model", "model", word_list, "NAME,NAME", "gpt-small, vgg11, ...; one row each; or all"),
    Choice(
        "--pass",
        "passes",
        _each_of("pass", get_args(Pass)),
        "PASS,PASS",
        "forward, backward (with the forward), step (all; default: each)",
    ),
    Choice(
        "--precision",
        "precision",
        _each_of("precision", get_args(Precision)),
        "P,P",
        "fp32 (default), bf16, fp16, pure_bf16, fp64",
    ),
    Choice("--warmup", "warmup", whole, "N", "steps of a launch before those that count (default: 1)"),
    Choice("--steps", "steps", whole, "N", "steps of a launch that are timed (default: 2)"),
    Choice("--launches", "launches", whole, "N", "fresh processes for each row: the unit of comparison (default: 3)"),
    Choice("--batch", "batch", whole, "N", "samples (default: 16)"),
    Choice("--context", "context", whole, "N", "of GPTs: tokens of a sample (default: 128)"),
    Choice("--vocabulary", "vocabulary", whole, "N", "of GPTs (default: 10000)"),
    Choice("--norm", "norm", str, "NAME", "of GPTs: rms (default), layer"),
    Choice("--device", "device", str, "NAME", "auto (default), cpu, cuda"),
    Choice("--timeout", "timeout_s", number, "S", "for a launch of a row; the row says when it ran out (default: 300)"),
    Choice("--seed", "seed", whole, "N", "of the model and its batch (default: 0)"),
)
SWITCHES: Final = (
    Switch("--compile", "compile", True, "torch.compile, block by block"),
    Switch("--activation-checkpointing", "activation_checkpointing", True, "forward every block again in the backward"),
    Switch("--bias", "bias", True, "of GPTs: linear layers with biases"),
    Switch("--untied", "tied", False, "of GPTs: a head of its own"),
    Switch("--dtypes", "dtypes", True, "instead of times: the types of each layer in a step, as autocast chooses them"),
    Switch("--no-matmul", "matmul", False, "do not time a matrix product to hold the rows against"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "trained",
        metavar="JOB",
        nargs="?",
        help="a train: job: time its model, on its data, with its loss and optimizer",
    )
    choices.add(parser.add_argument_group("what is timed"), CHOICES, SWITCHES)
    choices.add_measuring(parser, plot="the time of every row")


def run(args: argparse.Namespace) -> int:
    """Time every row, then show the table; the exit code is the run's, or 1 for a bad result."""
    from muster.launch.bench import measuring
    from muster.launch.bench.model_view import ModelView
    from muster.launch.common.host import visible_gpus
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request

    request, output = given(args, Request), given(args, Output)
    measuring.check(request, output)
    if args.model is None and args.trained is None:
        raise UsageError(
            f"--model: is missing; name one or several of {', '.join(NAMES)}, or all, or give a train: job"
        )
    job = None if args.trained is None else _timeable(args.trained)
    asked = _asked(args, job)
    words, of_job = ["model", *asked.get("model", [])], dict[str, Any]()
    if job is not None:
        words, of_job = [*words, job.name], {"workdir": job.workdir or str(Path.cwd()), "env": dict(job.env)}
    text = choices.job_text(words, threads_per_rank="auto", timing=asked, **of_job)
    prepared = prepare(replace(request, job=COMMAND_LINE, job_text=text))
    if asked.get("device") == "cuda" and prepared.submission.route.is_here and not visible_gpus():
        raise RefusedError("--device: cuda: this machine has no GPU; name a host that has (-w HOST), or take cpu")
    return measuring.measure([measuring.World("", prepared)], ModelView, output)


def _timeable(path: str) -> "Job":
    """Load a job whose model is timed.

    Raises:
        JobFileError: the file is wrong.
        RefusedError: it does not train, or in another Python than Muster's.
    """
    job = train_job(path, ())
    if job.python is not None:
        raise RefusedError(f"{path}: python: muster bench model times in Muster's own Python; remove python")
    return job


def _asked(args: argparse.Namespace, job: "Job | None") -> dict[str, Any]:
    """Return the settings that options and a job ask for; options win."""
    if job is None:
        return choices.changes(vars(args), TimingSettings, CHOICES, SWITCHES)
    section: dict[str, Any] = job.settings.model_dump(mode="json", exclude_unset=True)
    own = Choice("JOB", "train", lambda path: {key: section[key] for key in OF_TRAIN if key in section}, "", "")
    asked = choices.changes({**vars(args), "JOB": args.trained}, TimingSettings, (own, *CHOICES), SWITCHES)
    return {key: section[given] for key, given in OF_JOB.items() if given in section} | asked
