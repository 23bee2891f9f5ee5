"""Load a job file into a typed Job. All errors are reported at once, each with file, line, key and nearest valid name.

A relative `workdir` or `{text: PATH}` is relative to the folder of the job file, or to the working directory if `--set`
gave it. In the Job, both paths are absolute. A job without `name` is named after its file.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import JobFileError
from muster.jobs.basics.files import expanded
from muster.jobs.basics.words import nearest
from muster.jobs.spec import mistakes, python, yamlfile
from muster.jobs.spec.job import CommandSettings, Job, JobKind
from muster.jobs.spec.overrides import apply_override
from muster.jobs.spec.yamlfile import Document, KeyPath, Mistake

EXAMPLES: Final = Path(__file__).parents[1] / "examples"

COMMAND: Final = EXAMPLES / "command.yaml"
PROGRAMS: Final = {".py": "python", ".sh": "bash"}

# These fields are filled in from the section in the file; they are not keys of the file.
DERIVED: Final = ("kind", "settings")
PATHS: Final[tuple[KeyPath, ...]] = (("workdir",), ("train", "data", "text"))


@dataclass(frozen=True)
class LoadedJob:
    """A job, and its YAML text: the file with overrides, name and absolute paths filled in.

    `unread` maps every key that has no effect to its mistake. `idle` has the keys of `unread` with a default value.
    """

    job: Job
    text: str
    document: Document = field(compare=False)
    unread: Mapping[KeyPath, Mistake] = field(default_factory=dict)
    idle: Set[KeyPath] = frozenset()

    @property
    def typed_paths(self) -> list[str]:
        """The paths that were given by --set, as overrides with absolute paths, for a command in another folder."""
        given = [key for key in PATHS if not self.document.place(key).line]
        values = {key: value for key in given if isinstance(value := _value(self.document, key), str)}
        return [f"{yamlfile.spell(key)}={json.dumps(value)}" for key, value in values.items()]

    @property
    def dropped(self) -> list[Mistake]:
        """The unread keys with a value other than the default: the user expected an effect."""
        return [mistake for key, mistake in self.unread.items() if key not in self.idle]


def load_job(
    path: Path,
    kinds: Sequence[JobKind],
    overrides: Sequence[str] = (),
    *,
    text: str | None = None,
    allow_unread: bool = False,
) -> LoadedJob:
    """Load a job file and apply the `--set` overrides (`a.b=c`, where `c` is YAML).

    Args:
        text: the content, if there is no file; messages then use `path` as its name.
        allow_unread: accept keys without effect and leave it to the caller to report them.

    Raises:
        JobFileError: if the file is missing or wrong; one line per mistake.
        UsageError: if an override is not of the form `a.b=c`.
    """
    if text is None and path.suffix in PROGRAMS:
        program = yamlfile.flow([PROGRAMS[path.suffix], str(path)])
        raise JobFileError(
            f"{path}: is a program, expected a job file; write one with command: {program}, as in {_short(COMMAND)}"
        )
    try:
        document = yamlfile.read(path) if text is None else yamlfile.parse(text, str(path)).without_lines()
    except FileNotFoundError as error:
        raise JobFileError(f"{path}: no such file{_examples_hint(path)}") from error
    raw = document.mapping()
    for override in overrides:
        apply_override(document, override, kinds)
    raw = document.value = _named(raw, path)
    _make_absolute(document, path.parent.absolute())
    job = _build(document, raw, kinds)
    document.raise_mistakes()
    assert job is not None, "the job is invalid, but no mistake was recorded"
    loaded = LoadedJob(job, yamlfile.dump(raw), document, *_unread(document, job, kinds))
    if not allow_unread:
        document.mistakes += [replace(each, text=f"{each.text}; remove it") for each in loaded.dropped]
        document.raise_mistakes()
    return loaded


def _unread(document: Document, job: Job, kinds: Sequence[JobKind]) -> tuple[dict[KeyPath, Mistake], set[KeyPath]]:
    """Return the keys without effect, each with its mistake, and the set of those that have their default value."""
    found: dict[KeyPath, Mistake] = {}
    idle = set[KeyPath]()
    for each in next(kind.unread for kind in kinds if kind.key == job.kind)(job.settings):
        key = (job.kind, *each.key)
        found[key] = Mistake(document.place(key), key, each.text)
        idle |= {key} if each.is_default else set()
    return found, idle


def job_keys(kinds: Sequence[JobKind]) -> list[str]:
    """List the keys that are valid at the top of a job file."""
    return [key for key in Job.model_fields if key not in DERIVED] + [kind.key for kind in kinds]


def _build(document: Document, raw: dict[str, Any], kinds: Sequence[JobKind]) -> Job | None:
    """Validate the keys at the top of the file and the section of the job's kind, each with its own model."""
    valid = job_keys(kinds)
    by_key = {kind.key: kind for kind in kinds}
    given = [by_key[key] for key in raw if key in by_key]
    for key in raw:
        if key not in valid:
            homes = [kind.key for kind in given if kind.entry is not None and key in kind.settings.model_fields]
            document.complain((key,), mistakes.misplaced(f"{homes[0]}:") if homes else mistakes.unknown_key(key, valid))
    if len(given) != 1:
        _complain_of_kinds(document, [kind.key for kind in given], list(by_key))
    sections = [_section(document, raw[kind.key], kind, valid) for kind in given]
    settings = sections[0] if sections else None
    around = {key: raw[key] for key in raw if key in Job.model_fields and key not in DERIVED}
    around["kind"] = given[0].key if given else ""
    around["settings"] = settings or CommandSettings(argv=["a valid section, so that the rest can be checked"])
    return mistakes.check(Job, around, document)


def _section(document: Document, value: Any, kind: JobKind, above: Sequence[str]) -> Any:
    """Validate the section of a kind of job. The section `command:` is a list."""
    if kind.settings is not CommandSettings:
        return mistakes.check(kind.settings, value, document, (kind.key,), above=above)
    if isinstance(value, list):
        return mistakes.check(CommandSettings, {"argv": value}, document, (kind.key,), written=value)
    hint = ""
    if isinstance(value, str) and value.strip():
        try:
            hint = f"; write {kind.key}: {yamlfile.flow(shlex.split(value))}"
        except ValueError:  # a quote is not closed, so the text cannot be split
            hint = "; write it as a list with one item for each argument"
    document.complain((kind.key,), f"must be a list of text, got {yamlfile.show(value)}{hint}")
    return None


def _complain_of_kinds(document: Document, given: list[str], all_keys: list[str]) -> None:
    wanted = ", ".join(all_keys)
    if given:
        document.complain((given[-1],), f"{' and '.join(given)} are both given; expected exactly one of {wanted}")
    elif not any("did you mean" in mistake.text and len(mistake.path) == 1 for mistake in document.mistakes):
        document.complain((), f"there is no section with the work to run; expected exactly one of {wanted}")


def _named(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """If the job has no name, name it after its file, with `-` in place of characters that a name cannot have."""
    if "name" in raw:
        return raw
    return {"name": as_name(path.stem), **raw}


def as_name(title: str) -> str:
    """Turn a title into a valid job name: replace or drop the characters that are not allowed."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", title).lstrip("._-")[:64] or "job"


def _make_absolute(document: Document, folder: Path) -> None:
    if isinstance(document.value, dict) and "python" in document.value:
        typed = document.place(("python",)).line == 0
        document.value["python"] = python.absolute(document.value["python"], Path.cwd() if typed else folder)
    for path in PATHS:
        parent, value = _value(document, path[:-1]), _value(document, path)
        if isinstance(parent, dict) and isinstance(value, str) and value:
            typed = document.place(path).line == 0
            parent[path[-1]] = str((Path.cwd() if typed else folder) / expanded(value))


def _value(document: Document, path: KeyPath) -> Any:
    """Return the value at a path, or None."""
    value = document.value
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _examples_hint(path: Path) -> str:
    """Suggest a file with a similar name, in the folder of the missing file or among the examples."""
    beside = [*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")]
    examples = sorted(EXAMPLES.glob("*.yaml"))
    stems = {candidate.stem: candidate for candidate in (*examples, *beside)}
    if near := nearest(path.stem, stems):
        return f"; did you mean {_short(stems[near])}?"
    return f"; an example to start from: {_short(examples[0])}" if examples else ""


def _short(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
