"""Run folders, jobs, ranks and hosts whose words are aimed at the reader's terminal, which obeys none of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.terminals import ATTACKS, HOSTILE, forbidden_in, on_terminal, through_pipes

pytestmark = [pytest.mark.command, pytest.mark.slow]

LOOKS = (
    *(("list",), ("list", "--json"), ("status",), ("status", "--json"), ("watch",), ("watch", "--json")),
    *(("logs",), ("logs", "--attempt", "all", "--rank", "0"), ("logs", "--json"), ("logs", "--raw", "--json")),
    *(("why",), ("why", "--json"), ("timeline",), ("memory", "--run", "vgg"), ("profile",), ("checkpoint", "list")),
    *(("stop",), *((*words, HOSTILE.replace("\0", "")) for words in (("status",), ("checkpoint", "show")))),
)


@pytest.fixture
def hostile_run(make_run: Callable[..., Any]) -> Path:
    """A run that failed, with sequences for the terminal in all that it says."""
    folder = make_run().submitted(name=HOSTILE, kind=HOSTILE, transport=HOSTILE, host=HOSTILE).attempt()
    folder.started(host=HOSTILE)
    folder.event("warning", 1.5, text=HOSTILE).event("restarting", 2.0, why=HOSTILE, attempt=1, hosts=[HOSTILE])
    first = {"rank": 0, "node": 0, "host": HOSTILE, "code": 1, "signal": None, "ended": 1735689601.0, "cause": "own"}
    first |= {"message": HOSTILE, "last_lines": [HOSTILE, *ATTACKS.values()]}
    folder.exited(0, 3.0, code=1, cause="own", **{key: first[key] for key in ("host", "message", "last_lines")})
    verdict = {"class": HOSTILE, "code": 1, "message": HOSTILE, "next_step": HOSTILE}
    folder.verdict(first=first, **verdict)
    for stream in ("out", "err"):
        folder.write(0, "".join(f"{text}\n" for text in ATTACKS.values()), stream=stream)
        folder.write(1, HOSTILE.encode() + b"\xff\xfe\n", stream=stream)
    folder.step(3, unit=HOSTILE).ended(4.0, code=1, name=HOSTILE, message=HOSTILE)
    return folder.root


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: " ".join(look)[:20].encode("unicode_escape").decode())
def test_no_command_lets_the_terminal_obey_a_hostile_run(hostile_run: Path, look: tuple[str, ...]) -> None:
    code, sent = on_terminal(*look, "--runs", str(hostile_run))
    assert sent.strip()
    assert "Traceback" not in sent
    assert forbidden_in(sent) == []
    if look in (("why",), ("logs",), ("status",)):  # the words are still readable
        assert r"\x1b]0;owned\x07" in sent
        assert r"\u202eevil\u202c" in sent
    again, out, err = through_pipes(*look, "--runs", str(hostile_run))
    assert look != ("status", "--json") or json.loads(out)["message"] == HOSTILE
    assert again == code
    assert forbidden_in(out) == forbidden_in(err) == []


def test_raw_logs_are_what_the_rank_wrote(hostile_run: Path) -> None:
    _, out, _ = through_pipes("logs", "--raw", "--rank", "0", "--stream", "out", "--runs", str(hostile_run))
    assert out == "".join(f"{text}\n" for text in ATTACKS.values())


PLANNED = f"""
name: planned
env: {{WORD: {json.dumps(HOSTILE)}}}
command: [sh, -c, {json.dumps(HOSTILE)}]
"""


def test_plan_shows_a_hostile_job_without_obeying(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(PLANNED)
    code, sent = on_terminal("plan", str(job), "--runs", str(tmp_path / "runs"))
    assert code == 0, sent
    assert r"\x1b]0;owned\x07" in sent
    assert forbidden_in(sent) == []


@pytest.mark.parametrize("text", [f"{HOSTILE}: 1", f"name: {json.dumps(HOSTILE)}\ncommand: ['true']"])
def test_errors_about_a_hostile_job_are_not_obeyed(tmp_path: Path, text: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(text)
    code, sent = on_terminal("run", str(job), "--runs", str(tmp_path / "runs"))
    assert code == 65
    assert forbidden_in(sent) == []


@pytest.mark.parametrize(
    ("hosts", "source"),
    [
        (["-w", "$(touch${IFS}PWNED)@h1"], "node list: '$(touch${IFS}PWNED)' is not a user name"),
        (["-H", "hosts"], "hosts:1:"),
        (["-w", "h1", "--login", "user=;id;"], "--login:"),
        (["-w", "h1", "--jump", "$(id)"], "--jump:"),
        (["-w", "h\uff11"], "node list:"),
        (["-w", HOSTILE.split(" ", 1)[0] + "@h1"], "node list "),
        (["-w", "h1", "--site", "site.yaml"], "site.yaml"),
    ],
)
def test_hostile_names_are_refused_in_one_line_that_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[str], source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("h1 user=;id;\n")
    Path("site.yaml").write_text("ssh: {user: $(id)}\n")
    Path("job.yaml").write_text("command: ['true']\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for command in ("run", "plan"):
        code, sent = on_terminal(command, "job.yaml", *hosts, "--runs", str(tmp_path / "runs"))
        assert code in (2, 65), sent
        assert source in sent
        assert len(sent.splitlines()) == 1
        assert forbidden_in(sent) == []
    assert not Path("PWNED").exists()


# A run ----------------------------------------------------------------------------------------------------------------

RANK = """
import sys
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(errors="surrogatepass")
    for text in {attacks!r}:
        print(text, file=stream)
    for percent in (10, 50, 100):
        print(f"\\r\\x1b[2K\\x1b[32m{{percent:3}}%|bar\\x1b[0m\\x1b[K", end="", file=stream, flush=True)
    print(file=stream)
raise SystemExit({attacks!r}[0] + "the end")
"""
BAR = "".join(f"\r\x1b[2K\x1b[32m{percent:3}%|bar\x1b[0m\x1b[K" for percent in (10, 50, 100))


@pytest.fixture
def hostile_job(tmp_path: Path) -> list[str]:
    code = RANK.format(attacks=list(ATTACKS.values()))
    job = tmp_path / "job.yaml"
    job.write_text(f"env: {{PYTHONUTF8: '1'}}\ncommand: [python3, -c, {json.dumps(code)}]\n")
    return ["run", str(job), "--runs", str(tmp_path / "runs")]


def without_bars(text: str) -> str:
    return text.replace(BAR, "")


@pytest.mark.ranks
def test_a_rank_redraws_its_progress_bar_and_nothing_else(hostile_job: list[str]) -> None:
    code, sent = on_terminal(*hostile_job)
    assert code == 1, sent
    assert sent.count(BAR) == 2
    assert r"\x1b]52;c;cm0gLXJm\x1b" in sent
    assert r"\x1b]0;owned\x07the end" in sent
    assert forbidden_in(without_bars(sent)) == []


@pytest.mark.ranks
def test_a_rank_is_treated_alike_where_its_output_goes_to_a_pipe(hostile_job: list[str]) -> None:
    code, out, err = through_pipes(*hostile_job)
    assert code == 1
    assert BAR in out
    assert BAR in err
    assert forbidden_in(without_bars(out)) == forbidden_in(without_bars(err)) == []
    runs = hostile_job[-1]
    for look in ("logs", "why", "list"):
        _, sent = on_terminal(look, "--runs", runs)
        assert forbidden_in(sent) == []
        assert not re.search("\x1b\\[[0-2]?K", sent)
