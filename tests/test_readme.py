"""The README, held against what it speaks of: links, lines, tables, and the transcripts that need no cluster."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster.collectives_bench.catalog import OPERATIONS
from muster.jobs.basics import exits
from muster.jobs.spec.modes import MODES
from support.ahead import Ahead, parameters_of

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "DESIGN.md", "CHANGELOG.md")
RUN_LINE = "./setup.sh && .venv/bin/muster run jobs/examples/vgg11.yaml"
TEST_LINE = './setup.sh --dev && .venv/bin/pytest -m "not slow"'

MARKER = re.compile(r"<!-- test:run(?: exit=(\d+))? -->")


@dataclass(frozen=True)
class Transcript:
    """A `console` block: commands, each with the lines it shows; the code that its last command exits with."""

    steps: tuple[tuple[str, tuple[str, ...]], ...]
    exit_code: int


def fences(text: str) -> list[tuple[str, str, list[str]]]:
    """List fenced blocks as (the line before, the language, the lines within)."""
    found, lines, at = [], text.splitlines(), 0
    while at < len(lines):
        if lines[at].startswith("```"):
            end = lines.index("```", at + 1)
            found.append((lines[at - 1], lines[at][3:], lines[at + 1 : end]))
            at = end
        at += 1
    return found


def transcripts() -> list[Transcript]:
    """List the blocks that are marked to be run."""
    found = []
    for before, language, lines in fences(README):
        if language == "console" and (marker := MARKER.fullmatch(before)):
            steps: list[tuple[str, list[str]]] = []
            for line in lines:
                if line.startswith("$ "):
                    steps.append((line[2:], []))
                else:
                    steps[-1][1].append(line)
            found.append(Transcript(tuple((each, tuple(shown)) for each, shown in steps), int(marker[1] or 0)))
    return found


def pattern(shown: tuple[str, ...]) -> re.Pattern[str]:
    """Turn shown lines into a pattern: `…` stands for some of a line, a line of only `…` for any lines."""
    parts = []
    for line in shown:
        if line == "…":
            parts.append(r"(?:.*\n)*?")
        else:
            words = (r"[ ]+".join(map(re.escape, piece.split(" "))) for piece in re.sub(" +", " ", line).split("…"))
            parts.append(r".*?".join(words) + r"[ ]*\n")
    return re.compile("".join(parts))


def anchors(page: Path) -> set[str]:
    """Name the headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    dead = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        page = REPOSITORY / (path or name)
        if not target.startswith("https://") and not (page.exists() and (not anchor or anchor in anchors(page))):
            dead.append(target)
    assert dead == []


def test_the_first_screen_shows_the_line_that_runs_and_its_job_file() -> None:
    screen = README.splitlines()
    assert RUN_LINE in screen[:15]
    assert TEST_LINE in screen
    job = (REPOSITORY / "jobs/examples/vgg11.yaml").read_text(encoding="utf-8")
    shown = next(lines for _, language, lines in fences(README) if language == "yaml")
    assert shown == [line for line in job.splitlines() if not line.startswith("#")]


def test_ci_runs_the_test_line_as_it_stands_here() -> None:
    script = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    found = re.search(r"grep -m 1 -xE '(.+)' README\.md", script)
    assert found is not None
    assert re.findall(f"^{found[1]}$", README, re.MULTILINE) == [TEST_LINE]


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", README.partition("## Exit codes")[2].partition("##")[0], re.M)
    assert rows[0] == ("code", "class", "meaning")
    wanted = [(str(row.code), row.name, row.meaning) for row in exits.TABLE]
    assert rows[1 : len(wanted) + 1] == wanted
    signal, other = rows[len(wanted) + 1 :]
    assert (signal[:2], exits.class_of(exits.SIGNAL_BASE + 9)) == (("128+n", "signal"), "signal")
    assert (other[:2], exits.class_of(1)) == (("other", "failed"), "failed")


def test_the_table_of_modes_names_all_modes() -> None:
    section = README.partition("## Parallel equals serial")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(MODES)


def test_the_table_of_operations_names_all_operations() -> None:
    section = README.partition("## Measure the network")[2].partition("\n## ")[0]
    named = {word: re.findall(r"`(\w+)`", cell) for word, cell in re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.M)}
    assert named["all"] == [name for name, each in OPERATIONS.items() if not each.ours]
    assert named["ours"] == [name for name, each in OPERATIONS.items() if each.ours]


def test_every_error_text_under_troubleshooting_is_still_said() -> None:
    section = README.partition("## Troubleshooting")[2].partition("\n## ")[0]
    texts = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(texts) >= 10
    sources = [REPOSITORY / "setup.sh"]
    sources += [
        path for folder in ("cloudlab", "jobs", "launch", "slurm") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    said = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert [text for text in texts if text not in said] == []


def test_every_console_block_is_run() -> None:
    unmarked = [
        lines for before, language, lines in fences(README) if language == "console" and not MARKER.match(before)
    ]
    assert unmarked == []
    assert len(transcripts()) >= 3


Ended = tuple[str, int, str]  # command, exit code, what was shown


def followed(transcript: Transcript, runs: Path) -> list[Ended]:
    """Run the commands of a transcript up to the first that fails."""
    environ = {**os.environ, "MUSTER_RUNS": str(runs), "COLUMNS": "200"}
    ended: list[Ended] = []
    for command, _ in transcript.steps:
        program, *arguments = command.split()
        assert program == "muster"
        done = subprocess.run(
            [sys.executable, "-m", "muster", *arguments],
            cwd=REPOSITORY,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        ended.append((command, done.returncode, done.stdout))
        if done.returncode != 0:
            break
    return ended


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead[Transcript, Any]]:
    """What following each transcript came to, each with a folder of runs of its own."""
    chosen = parameters_of(request, "test_transcripts_show_what_happens", "transcript")
    folders = {transcript: tmp_path_factory.mktemp("transcript") for transcript in chosen}
    ahead = Ahead(lambda transcript: followed(transcript, folders[transcript] / "runs"), chosen)
    yield ahead
    ahead.close()


@pytest.mark.ranks
@pytest.mark.timeout(250)
@pytest.mark.parametrize("transcript", transcripts(), ids=lambda transcript: transcript.steps[0][0])
def test_transcripts_show_what_happens(transcript: Transcript, seen: Ahead[Transcript, list[Ended]]) -> None:
    ended = seen.result(transcript)
    for number, (command, code, said) in enumerate(ended, 1):
        assert code == (transcript.exit_code if number == len(transcript.steps) else 0), said
        assert pattern(transcript.steps[number - 1][1]).fullmatch(said), f"$ {command}\n{said}"
    assert len(ended) == len(transcript.steps)
