"""The `slurm:` section of a job file or a site file: options of sbatch, except those that Muster sets itself."""

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field, field_validator

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.strict import Strict

SIGNAL_S: Final = 60
EARLY_S: Final = 60  # sbatch(1): the signal may come this much earlier than requested
LONGEST_SIGNAL_S: Final = 65_535  # sbatch's own limit
LONGEST_TEXT: Final = 4000  # sbatch reads each word of a script into a buffer of 8192 bytes

TIME_FORMS: Final = "HH:MM:SS, D-HH:MM:SS or minutes"
_TIME: Final = re.compile(
    r"(?P<minutes>\d+)"
    r"|(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minute>\d{1,2}):(?P<second>\d{1,2})"
    r"|(?P<only_days>\d+)-(?P<day_hours>\d{1,2})(?::(?P<day_minutes>\d{1,2}))?"
)
_OPTION: Final = re.compile(r"--(?P<name>[A-Za-z][A-Za-z0-9_-]*)(?:=(?P<value>.*))?")

# Options that `extra` must not contain, and what to do instead. sbatch accepts any unambiguous prefix of an option.
_FIELDS: Final = (
    *("partition", "account", "qos", "constraint", "reservation", "time", "mem", "cpus-per-task", "gpus-per-node"),
    *("exclusive", "nodelist", "exclude", "comment", "requeue"),
)
_NOT_EXTRA: Final[dict[str, str]] = {
    **{name: f"set slurm.{name.replace('-', '_')}" for name in _FIELDS},
    "no-requeue": "set slurm.requeue: false",
    "signal": "set slurm.signal_s",
    "nodes": "set the job's nodes",
    "job-name": "set the job's name",
    **dict.fromkeys(
        ("gpus", "gpus-per-socket", "gpus-per-task"),
        "set slurm.gpus_per_node: the one task on a node, its agent, must see all GPUs",
    ),
    **dict.fromkeys(
        (
            *("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "nodefile"),
            *("output", "error", "input", "open-mode", "chdir", "no-kill", "array", "export", "export-file", "wrap"),
            *("parsable", "test-only", "wait", "help", "usage", "version"),
        ),
        "remove it: Muster sets this itself",
    ),
}


def _one_line(text: str) -> str:
    """Check that a text fits in one line of a batch script."""
    if not text.strip():
        raise ValueError("must not be empty; remove the key, or give it a value")
    if not text.isprintable():
        raise ValueError(f"must be printable text on one line, got {text!r}")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"must be at most {LONGEST_TEXT} characters, got {len(text)}")
    return text


OneLine = Annotated[str, AfterValidator(_one_line)]


def _time(time: str | int) -> str | int:
    seconds_of(time)
    return time


def _memory(mem: str) -> str:
    if mem != "0" and re.fullmatch(r"[1-9][0-9]{0,8}[KMGT]", mem) is None:
        raise ValueError(f"must be a whole number followed by K, M, G or T, such as 64G, or '0', got {mem!r}")
    return mem


class SlurmSettings(Strict):
    """Options for Slurm. If a key is not set, Slurm's own default applies."""

    partition: OneLine | None = Field(None, description="the partition", examples=["batch"])
    account: OneLine | None = Field(None, description="the account that pays", examples=["vision"])
    qos: OneLine | None = Field(None, description="the quality of service", examples=["normal"])
    constraint: OneLine | None = Field(None, description="features that nodes must have", examples=["a100"])
    reservation: OneLine | None = Field(None, description="a reservation to use", examples=["class-2026"])
    time: Annotated[str | int, AfterValidator(_time)] | None = Field(
        None, description=f"the time limit: {TIME_FORMS}", examples=["01:00:00"]
    )
    mem: Annotated[str, AfterValidator(_memory)] | None = Field(
        None, description="memory of each node; `0`: all of it", examples=["64G"]
    )
    cpus_per_task: Annotated[int, Field(ge=1)] | None = Field(None, description="cores of each node", examples=[16])
    gpus_per_node: Annotated[int, Field(ge=1)] | str | None = Field(
        None, description="GPUs of each node: a number, or TYPE:NUMBER", examples=["a100:4"]
    )
    exclusive: bool = Field(False, description="take whole nodes")
    nodelist: OneLine | None = Field(None, description="nodes that the job must have", examples=["n[01-04]"])
    exclude: OneLine | None = Field(None, description="nodes that the job must not have", examples=["n07"])
    comment: OneLine | None = Field(None, description="a comment in Slurm's records", examples=["course"])
    signal_s: Annotated[int, Field(ge=1, le=LONGEST_SIGNAL_S)] = Field(
        SIGNAL_S,
        description="seconds before the time limit at which Slurm signals the run; Slurm may do so up to 60 s earlier",
    )
    requeue: bool = Field(True, description="let Slurm queue the job again after a failed node or a preemption")
    extra: list[OneLine] = Field(
        default_factory=list, description="more options of sbatch", examples=[["--gres=disk:1"]]
    )

    @field_validator("gpus_per_node")
    @classmethod
    def _is_gpus(cls, gpus: int | str | None) -> int | str | None:
        if isinstance(gpus, str) and re.fullmatch(r"[A-Za-z0-9_.-]+:[1-9][0-9]{0,3}", gpus) is None:
            raise ValueError(f"must be a number or type:number, such as a100:4, got {gpus!r}")
        return gpus

    @field_validator("extra")
    @classmethod
    def _are_options(cls, extra: list[str]) -> list[str]:
        for option in extra:
            _check_option(option)
        return extra


def merged(site: SlurmSettings, job: SlurmSettings) -> SlurmSettings:
    """Merge the settings of site and job. A key that the job does not set has the value of the site.

    Raises:
        RefusedError: if the merged settings contradict each other.
    """
    settings = SlurmSettings(**{**site.model_dump(exclude_unset=True), **job.model_dump(exclude_unset=True)})
    least_s = settings.signal_s + EARLY_S
    given = settings.time is not None and "signal_s" in settings.model_fields_set
    if given and (limit_s := seconds_of(settings.time or 0)) <= least_s:
        raise RefusedError(
            f"slurm.signal_s: {settings.signal_s} s before a time limit of {limit_s} s (slurm.time) may be before "
            f"the job begins, because Slurm may signal {EARLY_S} s earlier; raise slurm.time above {least_s} s, or "
            "lower slurm.signal_s"
        )
    return settings


def signal_before(time: str | int | None, wanted_s: int) -> int:
    """Return how many seconds before the time limit Slurm should signal: `wanted_s`, or less if the limit is short."""
    return wanted_s if time is None else min(wanted_s, max(1, (seconds_of(time) - EARLY_S) // 2))


def split_option(option: str) -> tuple[str, str | None]:
    """Return the name and the value of `--name=value`; the value is None for a bare `--name`.

    Raises:
        ValueError: if the option has another form.
    """
    match = _OPTION.fullmatch(option)
    if match is None:
        raise ValueError(f"each must be of the form --name=value or --name, got {option!r}")
    return match["name"], match["value"]


def seconds_of(time: str | int) -> int:
    """Return the length of a time limit in seconds.

    Raises:
        ValueError: if the text has another form than those in TIME_FORMS. `90:00` is refused as ambiguous.
    """
    match = _TIME.fullmatch(str(time))
    if match is None:
        raise ValueError(f"must be {TIME_FORMS}, got {time!r}")
    part = {name: int(text or 0) for name, text in match.groupdict().items()}
    hours = part["hours"] + part["day_hours"] + 24 * (part["days"] + part["only_days"])
    minutes = part["minutes"] + part["minute"] + part["day_minutes"]
    if max(part["minute"], part["second"], part["day_minutes"]) > 59:
        raise ValueError(f"must have minutes and seconds below 60, got {time!r}; expected {TIME_FORMS}")
    seconds = 3600 * hours + 60 * minutes + part["second"]
    if seconds == 0:
        raise ValueError(f"must be more than 0 seconds, got {time!r}; expected {TIME_FORMS}")
    return seconds


def _check_option(option: str) -> None:
    name, _ = split_option(option)
    for refused, instead in _NOT_EXTRA.items():
        if refused.startswith(name):
            meant = f" (it stands for --{refused})" if refused != name else ""
            raise ValueError(f"--{name}{meant} cannot be given here; {instead}")
