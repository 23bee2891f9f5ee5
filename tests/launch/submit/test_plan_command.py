"""`muster plan`: the whole text against a golden file, and the same as records."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from muster.launch import cli
from support.plans import box

GOLDEN = Path(__file__).parent / "golden"

SITE = """\
env: {NCCL_DEBUG: WARN, SHARED: site}
setup: [module load python]
"""
COMMAND = """\
name: demo
nodes: 2
ranks_per_node: 2
workdir: /srv/work
env: {SHARED: job, TEXT: "a b$c"}
setup: ["echo 'two words'"]
command: [python3, train.py, --name, "it's"]
"""
TRAIN = """\
name: tiny
nodes: 2
workdir: /srv/work
threads_per_rank: auto
train: {model: gpt-nano, data: synthetic, steps: 2}
"""


def test_on_a_narrow_terminal_no_value_is_wider_than_it(muster_plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = muster_plan(TRAIN)[1].splitlines()
    tables = lines[lines.index("") : lines.index("commands")]
    assert max(map(len, tables)) <= 60
    assert "  MASTER_PORT = (at start)  (bound by node 0's agent when it" in tables
    assert any(line.startswith("rank 1, node 1, host") for line in tables)


@pytest.fixture
def muster_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return a function that plans a job on a fixed machine: (exit code, standard output)."""
    machine = replace(box(6, "0", "1", host="box"), environ=os.environ)
    monkeypatch.setattr("muster.launch.submit.prepare.this_machine", lambda: machine)
    monkeypatch.setattr("muster.launch.submit.prepare.check_files", lambda job, environ: None)  # /srv/work is not there
    monkeypatch.setattr(sys, "executable", "/opt/muster/bin/python")
    monkeypatch.setattr("muster.jobs.basics.boot.CODE_ROOT", Path("/opt/muster/code"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("GLOO_SOCKET_IFNAME", "MUSTER_SITE", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.yaml").write_text(COMMAND)
    (tmp_path / "site.yaml").write_text(SITE)

    def run(text: str, *options: str) -> tuple[int, str]:
        (tmp_path / "job.yaml").write_text(text)
        files = [str(tmp_path / "job.yaml"), "--site", str(tmp_path / "site.yaml"), "--runs", "/srv/runs"]
        code = cli.main(["plan", *files, *options])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("plan-command.txt", COMMAND, []),
        ("plan-train.txt", TRAIN, []),
        ("plan-ssh.txt", COMMAND, ["-w", "n[0-3]", "-e", "n1", "--on", "ssh", "--jump", "gate", "--login", "alice"]),
    ],
)
def test_the_whole_text_of_a_plan_is_the_golden_one(name: str, text: str, options: list[str], muster_plan) -> None:
    code, out = muster_plan(text, *options)
    assert code == 0
    assert out == (GOLDEN / name).read_text(encoding="utf-8")


def test_json_holds_the_same_plan_as_records_and_null_where_the_start_decides(muster_plan) -> None:
    code, out = muster_plan(COMMAND, "--json")
    record = json.loads(out)
    assert code == 0
    assert list(record) == [
        *("name", "kind", "transport", "start", "world_size", "pipeline"),
        *("workdir", "runs", "setup", "nodes", "python", "command", "function"),
    ]
    assert (record["name"], record["kind"], record["transport"], record["world_size"]) == (
        "demo",
        "command",
        "local",
        4,
    )
    assert (record["workdir"], record["runs"]) == ("/srv/work", "/srv/runs")
    assert record["setup"] == ["module load python", "echo 'two words'"]
    assert (record["command"], record["function"]) == (["python3", "train.py", "--name", "it's"], None)
    node = record["nodes"][1]
    assert list(node) == ["node", "host", "address", "environment", "ranks"]
    agent = ["/opt/muster/bin/python", "-I", "/opt/muster/code/muster/launch/boot.py", "muster.launch.agent", "--node"]
    assert record["start"] == [[*agent, "0"], [*agent, "1"]]
    rank = node["ranks"][1]
    assert [rank[key] for key in ("rank", "cores", "gpus", "threads")] == [3, [5], ["1"], 1]
    environment = {each["name"]: each for each in rank["environment"]}
    assert environment["RANK"] == {"name": "RANK", "value": "3", "origin": "placement"}
    undecided = {name for name, each in environment.items() if each["value"] is None}
    assert undecided == {
        "MUSTER_FILES",
        "MUSTER_SESSION",
        "MASTER_PORT",
        "MUSTER_RUN_ID",
        "MUSTER_RUN_DIR",
        "MUSTER_STOP_FILE",
        "TORCHELASTIC_RUN_ID",
    }
    every = [*node["environment"], *rank["environment"]]
    assert all(each.keys() == {"name", "value", "origin"} and each["origin"] for each in every)


def test_a_plan_shows_where_ranks_are_in_a_product_of_splits(muster_plan) -> None:
    text = TRAIN.replace("steps: 2}", "parallel: {tensor: 2, pipe: 2}}")
    code, out = muster_plan(text, "--set", "ranks_per_node=2")
    header, *rows = out[out.index("rank  ") :].splitlines()[:5]
    assert (code, header.split()[:4]) == (0, ["rank", "pipe", "tensor", "node"])
    assert [row.split()[:3] for row in rows] == [["0", "0", "0"], ["1", "0", "1"], ["2", "1", "0"], ["3", "1", "1"]]


def test_a_plan_writes_nothing_and_starts_nothing(muster_plan, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr("os.fork", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path / "runs"))
    assert muster_plan(COMMAND, "--runs", str(tmp_path / "runs"))[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "site.yaml"]


def test_a_plan_that_run_would_refuse_is_refused_with_the_same_code(muster_plan, capsys) -> None:
    assert muster_plan(COMMAND.replace("SHARED: job", "RANK: '0'"))[0] == 78
    assert muster_plan(TRAIN, "--set", "train.batch_size=1")[0] == 78
    assert muster_plan(COMMAND, "--set", "nodes=0")[0] == 65


def test_a_pipeline_shows_its_schedule_and_the_layers_of_every_stage(
    muster_plan: Callable[..., tuple[int, str]],
) -> None:
    text = TRAIN.replace("steps: 2}", "batch_size: 12, parallel: {data: 2, pipe: 2, zero: 1, schedule: zb1p}}")
    code, out = muster_plan(text.replace("nodes: 2", "nodes: 4").replace("gpt-nano", "gpt-micro"))
    assert code == 0
    wanted = """
pipeline data 2, zero 1 x pipe 2 by zb1p, 6 micro-batches a step
  stage  pipe  layers  from    to
  0      0     3       embed   block2
  1      1     4       block3  head

environment"""
    assert wanted in out


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ("mode: zbv", [[0, ["embed", "block1"]], [1, ["block2"]], [1, ["norm"]], [0, ["head"]]]),
        ("mode: 1f1b, cut: [embed, norm]", [[0, ["embed", "block1", "block2"]], [1, ["norm", "head"]]]),
        ("mode: model, cut: profile", None),  # known when layers have been timed
    ],
)
def test_stages_are_those_that_the_ranks_will_have(
    muster_plan: Callable[..., tuple[int, str]], more: str, stages: list[list[object]] | None
) -> None:
    _, out = muster_plan(TRAIN.replace("steps: 2}", f"{more}}}"), "--json")
    told = json.loads(out)["pipeline"]["stages"]
    assert told is None if stages is None else [[each["pipe"], each["layers"]] for each in told] == stages
    assert json.loads(muster_plan(TRAIN, "--json")[1])["pipeline"] is None
