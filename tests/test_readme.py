"""The README and the pages of docs/, checked against the code: links, lines, tables, and transcripts."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from muster.collectives_bench.catalog import OPERATIONS
from muster.jobs.basics import exits
from muster.jobs.spec.modes import MODES
from muster.jobs.spec.schema import job_schema
from muster.jobs.spec.site import Site
from muster.jobs.spec.yamlcore import CoreLoader
from muster.launch.common.kinds import KINDS
from support.ahead import Ahead, parameters_of
from support.programs import Programs
from support.transcripts import ALONE, MARKER, REPOSITORY, Ended, Transcript, fences, followed, pattern, transcripts

pytestmark = [pytest.mark.command, pytest.mark.slow]

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
DOCS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md"))}
PAGES = (
    "README.md",
    "DESIGN.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(f"docs/{name}.md" for name in DOCS),
)
MOST_LINES, MOST_WORDS = 150, 1500  # of the README
RUN_LINE = "./setup.sh && .venv/bin/muster run jobs/examples/vgg11.yaml"
TEST_LINE = './setup.sh --dev && .venv/bin/pytest -m "not slow"'


specification = importlib.util.spec_from_file_location("reference", REPOSITORY / "docs/reference.py")
assert specification is not None
assert specification.loader is not None
reference = importlib.util.module_from_spec(specification)
specification.loader.exec_module(reference)


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
        page = (REPOSITORY / name).parent / path if path else REPOSITORY / name
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


def test_the_readme_stays_short_and_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert len(README.split()) <= MOST_WORDS
    assert [name for name in DOCS if f"(docs/{name}.md" not in README] == []


def test_ci_runs_the_test_line_as_it_stands_here() -> None:
    script = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    found = re.search(r"grep -m 1 -xE '(.+)' README\.md", script)
    assert re.findall(f"^{found[1]}$", README, re.MULTILINE) == [TEST_LINE]


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", DOCS["exit-codes"], re.M)
    assert rows[0] == ("code", "class", "meaning")
    wanted = [(str(row.code), row.name, row.meaning) for row in exits.TABLE]
    assert rows[1 : len(wanted) + 1] == wanted
    signal, other = rows[len(wanted) + 1 :]
    assert (signal[:2], exits.class_of(exits.SIGNAL_BASE + 9)) == (("128+n", "signal"), "signal")
    assert (other[:2], exits.class_of(1)) == (("other", "failed"), "failed")


@pytest.mark.parametrize(("name", "keys"), [("job-file", reference.job_keys), ("site-file", reference.site_keys)])
def test_the_tables_of_keys_are_those_of_the_models(name: str, keys: Callable[[], str]) -> None:
    """`.venv/bin/python docs/reference.py` writes them; a key without a description is an error there."""
    assert DOCS[name].partition(reference.MARK)[2].strip() == keys().strip()


def test_the_examples_of_keys_are_valid() -> None:
    definitions = job_schema(KINDS)["$defs"]
    definitions["Site"] = Site.model_json_schema()
    validator = jsonschema.Draft202012Validator({"$defs": {**definitions, **definitions["Site"]["$defs"]}})
    for section in [*definitions.values()]:
        for key, field in reference.mapping_of(section).get("properties", {}).items():
            if "description" not in field:
                continue
            value = yaml.load(reference.example_of(key, field), CoreLoader)
            assert [str(each) for each in validator.descend(value, field)] == [], key


def test_the_table_of_modes_names_all_modes() -> None:
    section = DOCS["modes"].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(MODES)


def test_the_table_of_operations_names_all_operations() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCS["benchmarks"], re.M)
    named = {word: re.findall(r"`(\w+)`", cell) for word, cell in rows}
    assert named["all"] == [name for name, each in OPERATIONS.items() if not each.ours]
    assert named["ours"] == [name for name, each in OPERATIONS.items() if each.ours]


def test_every_error_text_of_troubleshooting_is_still_said() -> None:
    texts = re.findall(r"^\| `([^`]+)` \|", DOCS["troubleshooting"], re.MULTILINE)
    assert len(texts) >= 10
    sources = [REPOSITORY / "setup.sh"]
    sources += [
        path for folder in ("cloudlab", "jobs", "launch", "slurm") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    said = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert [text for text in texts if text not in said] == []


def all_transcripts() -> list[Transcript]:
    return [each for page in PAGES for each in transcripts((REPOSITORY / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_console_block_is_run(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    unmarked = [lines for before, language, lines in fences(text) if language == "console" and not MARKER.match(before)]
    assert unmarked == []


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead[Transcript, Any]]:
    """What following each transcript came to, each with a folder of runs of its own."""
    chosen = parameters_of(request, "test_transcripts_show_what_happens", "transcript")
    chosen = [each for each in chosen if not ALONE.match(each.steps[0][0])]
    folders = {transcript: tmp_path_factory.mktemp("transcript") for transcript in chosen}
    ahead = Ahead(lambda transcript: followed(transcript, folders[transcript] / "runs"), chosen)
    yield ahead
    ahead.close()


def test_equal_transcripts_are_followed_once_and_in_their_order() -> None:
    """Before, the first of two equal ones waited for the second, behind all between them."""
    called: list[str] = []
    ahead = Ahead(called.append, ["a", "b", "a", "c"])
    assert [ahead.result(key) for key in ("a", "b", "a", "c")] == [None] * 4
    ahead.close()
    assert sorted(called) == ["a", "b", "c"]


@pytest.mark.ranks
@pytest.mark.timeout(250)
@pytest.mark.parametrize("transcript", all_transcripts(), ids=lambda transcript: transcript.steps[0][0])
def test_transcripts_show_what_happens(
    transcript: Transcript, seen: Ahead[Transcript, list[Ended]], programs: Programs, tmp_path: Path
) -> None:
    ended = followed(transcript, tmp_path, programs) if ALONE.match(transcript.steps[0][0]) else seen.result(transcript)
    for number, (command, code, said) in enumerate(ended, 1):
        assert code == (transcript.exit_code if number == len(transcript.steps) else 0), said
        assert pattern(transcript.steps[number - 1][1]).fullmatch(said), f"$ {command}\n{said}"
    assert len(ended) == len(transcript.steps)
