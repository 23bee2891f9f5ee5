"""`muster env` and `muster schema`: what they print, as data and as text."""

import json
import subprocess
import sys

import pytest

from muster.jobs.spec.schema import job_schema
from muster.launch.cli import main
from muster.launch.commands.env import describe, render
from muster.launch.common.kinds import KINDS

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}


def test_env_says_each_value_and_where_it_came_from() -> None:
    record, error = describe({**TORCHRUN, "HOME": "/home/user"})
    assert error is None
    assert (record["launcher"], record["seen"]) == ("torchrun", TORCHRUN)
    assert {"name": "rank", "value": 1, "origin": "RANK"} in record["rank_environment"]
    assert {"name": "master_port", "value": 29500, "origin": "default"} in record["rank_environment"]


def test_env_as_text_shows_the_same_rows() -> None:
    text = render(describe(TORCHRUN)[0])
    assert text.splitlines()[0] == "started by  torchrun"
    assert ["master_addr", "h", "MASTER_ADDR"] in [line.split() for line in text.splitlines()]
    assert text.endswith(
        "variables seen\n  RANK=1\n  WORLD_SIZE=2\n  LOCAL_RANK=1\n  LOCAL_WORLD_SIZE=2\n  MASTER_ADDR=h"
    )


def test_env_outside_any_launcher_has_seen_nothing() -> None:
    text = render(describe({})[0])
    assert text.startswith("started by  local")
    assert text.endswith("variables seen: none")


def test_env_that_is_refused_shows_what_was_seen_and_exits_78(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.environ", {"PMIX_RANK": "1"})
    assert main(["env", "--json"]) == 78
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert (record["rank_environment"], record["seen"]) == (None, {"PMIX_RANK": "1"})
    assert printed.err == f"muster: {record['error']}\n"


def test_schema_prints_the_schema_of_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == job_schema(KINDS)


def test_reading_jobs_sites_and_ranks_imports_no_torch() -> None:
    modules = ("spec.load", "spec.schema", "spec.site", "hosts.placement", "hosts.detect")
    imported = ", ".join(["muster.launch.commands.env", *(f"muster.jobs.{each}" for each in modules)])
    script = f"import sys, {imported}; print(*{{name.split('.')[0] for name in sys.modules}} & {{'torch', 'numpy'}})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout.strip() == ""
