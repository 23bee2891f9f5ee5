"""The console blocks of the README and the pages of docs/: read, run, and compared with what is shown."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.programs import Programs

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = {"muster": [sys.executable, "-m", "muster"], "python": [sys.executable], "diff": ["diff"]}
ALONE = re.compile(r"python |muster (bench model|memory|plan|predict|schedule) ")  # these start no process

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


def transcripts(text: str) -> list[Transcript]:
    """List the blocks of a page that are marked to be run."""
    found = []
    for before, language, lines in fences(text):
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


Ended = tuple[str, int, str]  # command, exit code, what was shown


def followed(transcript: Transcript, runs: Path, programs: Programs | None = None) -> list[Ended]:
    """Run the commands of a transcript up to the first that fails; with `programs`, in forks that have torch."""
    environ = {**os.environ, "MUSTER_RUNS": str(runs), "COLUMNS": "200"}
    ended: list[Ended] = []
    for command, _ in transcript.steps:
        program, *arguments = command.split()
        argv = [*PROGRAMS[program], *arguments]
        if programs:
            done = programs.run(*argv[1:], cwd=REPOSITORY, env=environ)
        else:
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            done = subprocess.run(argv, cwd=REPOSITORY, env=environ, text=True, timeout=100, check=False, **output)
        ended.append((command, done.returncode, done.stdout + (done.stderr or "")))
        if done.returncode != 0:
            break
    return ended
