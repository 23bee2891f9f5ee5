"""The `slurm:` section: what it may say, and how a job's lies over a site's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.slurm import SlurmSettings, merged, seconds_of, signal_before, split_option

TIMES = [
    (30, 1800),
    ("30", 1800),
    ("00:30:00", 1800),
    ("1:02:03", 3723),
    ("100:00:00", 360_000),
    ("2-03:04:05", 183_845),
    ("1-0", 86_400),
    ("1-12:30", 131_400),
]
MEMORY = ["4G", "512M", "1T", "8000K", "0"]


def message_of(**fields: object) -> str:
    """Return what the section refuses about its only wrong key."""
    with pytest.raises(ValidationError) as caught:
        SlurmSettings(**fields)
    errors = caught.value.errors()
    return str(errors[0]["ctx"]["error"]) if "error" in errors[0].get("ctx", {}) else errors[0]["msg"]


@pytest.mark.parametrize(("time", "seconds"), TIMES)
def test_a_time_limit_is_minutes_or_a_clock_with_days(time: str | int, seconds: int) -> None:
    assert SlurmSettings(time=time).time == time
    assert seconds_of(time) == seconds


@pytest.mark.parametrize(
    ("field", "wanted", "values"),
    [
        (
            "time",
            "HH:MM:SS, D-HH:MM:SS or minutes",
            ["90:00", "1h", "", "0", "00:00:00", "00:60:00", "00:00:75", "1-0:99", "-5", "1:2:3:4"],
        ),
        ("mem", "such as 64G", ["4", "4GB", "4g", "0G", "", "4G\n"]),
        ("gpus_per_node", "such as a100:4", ["four", "a100:4,v100:2"]),
    ],
)
def test_other_forms_are_refused(field: str, wanted: str, values: list[str]) -> None:
    for value in values:
        assert wanted in message_of(**{field: value}), value


def test_memory_has_a_unit_and_gpus_are_a_number_or_a_type_and_a_number() -> None:
    assert [SlurmSettings(mem=mem).mem for mem in MEMORY] == MEMORY
    assert [SlurmSettings(gpus_per_node=gpus).gpus_per_node for gpus in (4, "a100:4")] == [4, "a100:4"]


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_limit_written_out_has_its_length(days: int, hours: int, minutes: int, seconds: int) -> None:
    length = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if length:
        assert seconds_of(f"{days}-{hours:02d}:{minutes:02d}:{seconds:02d}") == length
        assert seconds_of(f"{days * 24 + hours:02d}:{minutes:02d}:{seconds:02d}") == length


@pytest.mark.parametrize("value", ["a\nb", "a\tb", "\0", "a\u2028b", " ", ""])
def test_no_value_leaves_its_line(value: str) -> None:
    for field in ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "comment"):
        message_of(**{field: value})
    message_of(extra=[f"--foo={value}" if value.strip() else value])


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--partition=x", "--partition cannot be given here; set slurm.partition"),
        ("--mem=1G", "--mem cannot be given here; set slurm.mem"),
        ("--cpus-per-task=1", "set slurm.cpus_per_task"),
        ("--no-requeue", "set slurm.requeue: false"),
        ("--signal=USR1@9", "set slurm.signal_s"),
        ("--nodes=2", "set the job's nodes"),
        ("--gpus-per-task=1", "must see all GPUs"),
        ("--ntasks=8", "Muster sets this itself"),
        ("--output=x", "Muster sets this itself"),
        ("--export=NONE", "Muster sets this itself"),
        ("--wrap=ls", "Muster sets this itself"),
        ("--arr=0-3", "--arr (it stands for --array) cannot be given here"),
        ("-p x", "must be of the form --name=value"),
        ("--gres disk:1", "must be of the form --name=value"),
        ("gres", "must be of the form --name=value"),
    ],
)
def test_extra_refuses_what_muster_itself_sets_and_says_what_to_set(option: str, advice: str) -> None:
    assert advice in message_of(extra=["--gres=disk:1", option])


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("--gres=disk:1", ("gres", "disk:1")),
        ("--dependency=afterok:12", ("dependency", "afterok:12")),
        ("--mem-per-cpu=2G", ("mem-per-cpu", "2G")),
        ("--wait-all-nodes=1", ("wait-all-nodes", "1")),
        ("--time-min=10", ("time-min", "10")),
        ("--comment2=a=b # c", ("comment2", "a=b # c")),
        ("--hold", ("hold", None)),
    ],
)
def test_other_options_pass(option: str, parts: tuple[str, str | None]) -> None:
    assert SlurmSettings(extra=[option]).extra == [option]
    assert split_option(option) == parts


def test_a_job_wins_over_its_site_by_what_it_names() -> None:
    site = SlurmSettings(partition="gpu", account="lab", time="10:00:00", requeue=False, extra=["--gres=disk:1"])
    job = SlurmSettings(time=30, partition=None, requeue=True)
    both = merged(site, job)
    assert (both.partition, both.account, both.time, both.requeue) == (None, "lab", 30, True)
    assert both.extra == ["--gres=disk:1"]
    assert merged(site, SlurmSettings()) == site
    assert merged(SlurmSettings(), job) == job


def test_a_signal_before_the_job_begins_is_refused() -> None:
    words = r"slurm.signal_s: 60 s before a time limit of 120 s \(slurm.time\).*above 120 s"
    with pytest.raises(RefusedError, match=words):
        merged(SlurmSettings(time=2), SlurmSettings(signal_s=60))
    assert merged(SlurmSettings(time=2), SlurmSettings(signal_s=59)).signal_s == 59


def test_a_signal_that_nobody_set_is_as_early_as_a_short_limit_allows() -> None:
    found = [signal_before(time, 90) for time in (None, "01:00:00", 4, 2, 1)]
    assert found == [90, 90, 90, 30, 1]


def test_unknown_keys_and_wrong_types_are_refused() -> None:
    for fields in ({"partion": "x"}, {"requeue": "yes"}, {"cpus_per_task": 0}, {"signal_s": 65_536}, {"extra": "--x"}):
        message_of(**fields)
