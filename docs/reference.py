"""Write docs/job-file.md and the table of docs/site-file.md from the models: .venv/bin/python docs/reference.py"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from muster.jobs.spec.schema import job_schema
from muster.jobs.spec.site import Site
from muster.launch.common.kinds import KINDS

HERE: Final = Path(__file__).resolve().parent
Schema = Mapping[str, Any]
KIND_KEYS: Final = {kind.key for kind in KINDS}  # each has a section of its own
MARK: Final = "<!-- from here on written by docs/reference.py -->\n"
SECTIONS: Final = {  # of the page, in order: heading, what it is
    "": ("The job", "Keys of every job."),
    "command": ("`command:`", "The program and its arguments, started on every rank: `command: [python, train.py]`."),
    "CheckpointSettings": ("`checkpoint:`", "When a run saves. [Failures](failures.md)."),
    "RestartSettings": ("`restart:`", "What a run does when something fails. [Failures](failures.md)."),
    "TrainSettings": ("`train:`", "A training. [Modes](modes.md)."),
    "ModelSettings": ("`train.model:`", "A built-in model, a GPT of given sizes, or [your own](own-model.md)."),
    "DataSettings": ("`train.data:`", "Exactly one of `name`, `text` and `make`."),
    "ParallelSettings": (
        "`train.parallel:`",
        "A split written out. The product of the degrees is the number of ranks.",
    ),
    "OptimizerSettings": ("`train.optimizer:`", ""),
    "ScheduleSettings": ("`train.schedule:`", "A linear warm-up, then a shape from lr down to lr * final."),
    "ProfileSettings": ("`train.profile:`", "`true`, `false`, or a mapping. [Profiles](see.md#profiles)."),
    "BenchSettings": ("`bench:`", "Measures the network. [Benchmarks](benchmarks.md)."),
    "TimingSettings": ("`timing:`", "Times models alone, on one rank. [Benchmarks](benchmarks.md#models)."),
    "SlurmSettings": ("`slurm:`", "What Slurm is asked for. A key that is absent leaves Slurm's default."),
}


def job_keys() -> str:
    """Return the tables of the job file."""
    schema = job_schema(KINDS)
    parts = []
    for name, (title, about) in SECTIONS.items():
        parts += [f"## {title}", about]
        if name != "command":
            parts.append(table(mapping_of(schema["$defs"][name]) if name else schema))
    return "\n\n".join(filter(None, parts)) + "\n"


def site_keys() -> str:
    """Return the tables of the site file."""
    schema = Site.model_json_schema()
    ssh = mapping_of(schema["$defs"]["SshSettings"])
    return f"## Keys\n\n{table(schema)}\n\n## `ssh:`\n\n{table(ssh)}\n"


def page(name: str, keys: str) -> str:
    """Return a page with new tables below its mark."""
    head, mark, _ = (HERE / name).read_text(encoding="utf-8").partition(MARK)
    return f"{head}{mark}\n{keys}"


def mapping_of(section: Schema) -> Schema:
    """Return the part of a section that is a mapping: a word or a boolean may stand in its place."""
    return next((each for each in section.get("anyOf", ()) if "properties" in each), section)


def table(schema: Schema) -> str:
    """Return a row for each key."""
    rows = ["| key | type | default | meaning | example |", "|---|---|---|---|---|"]
    for key, field in schema["properties"].items():
        if key in KIND_KEYS:
            continue
        cells = (
            f"`{key}`",
            kind_of(field),
            default_of(field, is_required=key in schema.get("required", ())),
            meaning_of(field),
            f"`{key}: {example_of(key, field)}`",
        )
        rows.append(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |")
    return "\n".join(rows)


def meaning_of(field: Schema) -> str:
    """Return a field's description.

    Raises:
        ValueError: it has none.
    """
    found = next((each["description"] for each in (field, *field.get("anyOf", ())) if "description" in each), "")
    if not found:
        raise ValueError(f"a key has no description: {field}")
    return str(found)


def options(field: Schema) -> Iterator[Schema]:
    """Yield the alternatives of a field."""
    for each in field.get("anyOf", (field,)):
        if "anyOf" in each:
            yield from options(each)
        else:
            yield each


def kind_of(field: Schema) -> str:
    """Return a field's type in words."""
    words = dict.fromkeys(_kind(each) for each in options(field) if each.get("type") != "null")
    return " or ".join(words)


def _kind(field: Schema) -> str:
    if "$ref" in field or field.get("type") == "object":
        return "mapping"
    if "enum" in field or "const" in field:
        words = [f"`{word}`" for word in field.get("enum", [field.get("const")])]
        return ", ".join(words) if len(words) <= 8 else f"{words[0]} … {words[-1]}"
    if field.get("type") == "array":
        items = field.get("items", {})
        return f"list of {kind_of(items)}" if items else "list"
    kinds = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "array": "list"}
    return kinds.get(str(field.get("type")), "text") + _bounds(field)


def _bounds(field: Schema) -> str:
    least, above = field.get("minimum"), field.get("exclusiveMinimum")
    text = f" >= {least}" if least is not None else f" > {above:g}" if above is not None else ""
    most = field.get("exclusiveMaximum")
    return text + (f", < {most:g}" if most is not None and most < 1e6 else "")


def default_of(field: Schema, *, is_required: bool) -> str:
    """Return a field's default as YAML spells it; of one that follows from others, the description says so."""
    value = field.get("default")
    return "required" if is_required else "" if value is None or isinstance(value, dict) else f"`{spelt(value)}`"


def example_of(key: str, field: Schema) -> str:
    """Return a value that the key may have: a given one, or one that is not the default."""
    if given := field.get("examples"):
        return spelt(given[0])
    default = field.get("default")
    if isinstance(default, bool):
        return spelt(not default)
    words = [word for each in options(field) for word in each.get("enum", [each.get("const")])]
    words += [word for each in options(field) for word in each.get("items", {}).get("enum", ())]
    if fitting := [word for word in words if word is not None and default not in (word, [word])]:
        return spelt(fitting[0])
    if default is None:
        return "2"
    if isinstance(default, float):
        return spelt(default / 2 or 0.5)
    if isinstance(default, int):
        return spelt(2 * default or 1)
    return spelt(default)


def spelt(value: Any) -> str:
    """Spell a value as YAML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {spelt(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spelt, value)) + "]"
    if isinstance(value, str):
        return f'"{value}"' if "[" in value or (":" in value and value[0].isdigit()) else value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def main() -> None:
    """Write both pages."""
    for name, keys in (("job-file.md", job_keys()), ("site-file.md", site_keys())):
        (HERE / name).write_text(page(name, keys), encoding="utf-8")


if __name__ == "__main__":
    main()
