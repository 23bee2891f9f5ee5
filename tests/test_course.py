"""Commands of docs/course.md: their options exist, and their settings fit a job. Its console blocks run elsewhere."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from muster.jobs.spec.load import load_job
from muster.launch.cli import command_of
from muster.launch.common.kinds import KINDS
from muster.launch.common.program_words import parse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/course.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"`(muster [^`]+)`", PAGE)))
SETTINGS = sorted({each for each in re.findall(r"`([^`]*--set [^`]+)`", PAGE) if "--parameters" not in each})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_has_these_options(command: str) -> None:
    parser, rest, _, _ = command_of(shlex.split(command)[1:])
    parse(parser, rest)


@pytest.mark.parametrize("words", SETTINGS)
def test_settings_of_the_page_fit_a_job(words: str) -> None:
    given = shlex.split(words)
    overrides = [value for option, value in pairwise(given) if option == "--set"]
    swept = [value.split(",")[0] for option, value in pairwise(given) if option == "--grid"]
    default = "jobs/examples/gpt-nano.yaml" if "tensor" in words else "jobs/examples/vgg11.yaml"
    job = next((each for each in given if each.endswith(".yaml") and each != "JOB.yaml"), default)
    load_job(ROOT / job, KINDS, (*overrides, *swept), allow_unread=True)
