"""`muster check`: real agents are asked, a report is printed, nothing is left."""

import json
from pathlib import Path
from typing import Any

import pytest

from muster.launch.check import inspection
from muster.launch.cli import main
from muster.launch.common.fingerprint import fingerprint
from support.box import LiveBox

pytestmark = [pytest.mark.command, pytest.mark.slow]

JOB = "name: look\nnodes: 2\ncommand: ['true']\n"
TRAIN = "name: look\nnodes: 2\ntrain: {model: vgg11, data: digits, device: cuda}\n"
FOUR = "name: look\nnodes: 4\ncommand: ['true']\n"


class Check:
    """The command in this process: its code, what it printed, and the rows as data."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capture = capture
        self.runs = folder / "some" / "runs"
        self.site = folder / "site.yaml"
        self.site.write_text("{}\n")

    def __call__(self, text: str, *options: str) -> int:
        (self.folder / "job.yaml").write_text(text)
        argv = ["check", str(self.folder / "job.yaml"), "--runs", str(self.runs), "--site", str(self.site), *options]
        fingerprint.cache_clear()  # as a new process would see it, should somebody edit the code meanwhile
        code = main(argv)
        self.out, self.err = self.capture.readouterr()
        return code

    def data(self, text: str, *options: str) -> Any:
        code = self(text, "--json", *options)
        found = json.loads(self.out)
        assert found["code"] == code
        return found


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(tmp_path, capsys)


def test_pretend_nodes_are_asked_as_real_ones_and_nothing_is_left(check: Check, tmp_path: Path) -> None:
    assert check(JOB) == 0, check.out + check.err
    lines = check.out.splitlines()
    assert lines[0].split()[:5] == ["node", "host", "agent", "python", "torch"]
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
    assert lines[-1] == "2 of 2 nodes can take part"
    assert not (tmp_path / "some").exists()


def test_the_same_report_as_data_and_a_folder_of_runs_that_was_there_stays(check: Check) -> None:
    (check.runs / "older").mkdir(parents=True)
    found = check.data(JOB)
    assert (found["code"], found["exclude"]) == (0, "")
    assert [path.name for path in check.runs.iterdir()] == ["older"]
    for number, node in enumerate(found["nodes"]):
        assert (node["node"], node["state"]) == (number, "good")
        assert node["facts"]["code"] == fingerprint()
        assert node["cells"]["master"] == {"text": "ok", "state": "good", "why": ""}
        assert node["cells"]["runs"]["text"] == "shared"


def test_a_node_that_lacks_what_the_job_needs_is_refused(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nor a GPU that is visible
    assert check(TRAIN) == 78
    assert "has no GPU, but the job's device is cuda; run nvidia-smi there" in check.out


def interpreter(check: Check, text: str) -> None:
    path = check.folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    check.site.write_text(f"interpreter: {path}\n")


def test_agents_that_do_not_come_to_life_are_all_named(check: Check) -> None:
    interpreter(check, "exit 3")
    assert check(JOB) == 69
    assert check.out.count("failed !!") == 2
    assert "0 of 2 nodes can take part" in check.out


def test_an_agent_that_says_nothing_is_given_up(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "LIMIT_S", 1.0)
    interpreter(check, "exec cat >/dev/null")
    assert check(JOB) == 69
    assert check.out.count("no answer within 1 s; is it on, and reachable from here?") == 2


def test_a_folder_of_runs_that_cannot_be_made_ends_it_at_once(check: Check) -> None:
    check.runs = Path("/proc/none/runs")
    assert check(JOB) == 73
    assert "choose another folder with --runs DIR" in check.err


def test_a_queue_s_nodes_cannot_be_asked(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert check(JOB, "--on", "slurm") == 78
    assert "--on slurm: its nodes cannot be checked from here" in check.err


# On real hosts --------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["ssh", "pdsh"])
def test_the_nodes_of_a_box_are_all_good(check: Check, box: LiveBox, transport: str) -> None:
    found = check.data(FOUR, "--hosts", box.spelt, "--on", transport, "--smoke")
    smoke = found["smoke"]
    assert (smoke["why"], smoke["hosts"], smoke["interfaces"]) == ("", ["node0", "node1"], ["eth1", "eth1"])
    assert smoke["settings"] == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert {node["state"] for node in found["nodes"]} <= {"good", "warning"}, found
    for node in found["nodes"]:
        assert node["facts"]["route"][0] == "eth1"
        assert node["cells"]["master"]["text"] == "ok"
        assert node["cells"]["runs"]["text"] == "shared"
    assert found["code"] == 0


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_a_node_that_is_gone_is_named_with_how_to_go_on(check: Check, box: LiveBox, how: str) -> None:
    box.fail("node2", how)
    try:
        assert check(FOUR, "--hosts", box.spelt) == 69
        assert "bad: node2: no" in check.out  # answer, or no sshd there
        assert "3 of 4 nodes can take part" in check.out
        assert "to continue without the others: --exclude node2 --nodes 3" in check.out
        check(FOUR, "--hosts", box.spelt, "--exclude", "node2", "--nodes", "3")
        assert "3 of 3 nodes can take part" in check.out
    finally:
        box.heal("node2")


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_storage_that_is_not_shared_is_a_warning(check: Check, apart_box: LiveBox) -> None:
    assert apart_box.runs is not None
    check.runs = apart_box.runs
    found = check.data(FOUR, "--hosts", apart_box.spelt)
    assert {node["cells"]["runs"]["text"] for node in found["nodes"]} == {"apart"}
    assert found["code"] == 0


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_code_that_is_not_where_the_site_file_says_is_named(check: Check, box: LiveBox, tmp_path: Path) -> None:
    check.site.write_text(f"code: {tmp_path}/nothing\n")
    assert check(FOUR, "--hosts", box.spelt) == 78
    assert (
        f"node[0-3]: Muster's code is not there: {tmp_path}/nothing/muster/launch/boot.py; run muster sync" in check.out
    )


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_master_address_that_nodes_do_not_share_is_named(check: Check, box: LiveBox) -> None:
    assert check(FOUR, "--hosts", box.spelt, "--iface", "eth7") == 78
    assert "node0: --iface eth7: this host has no such network; it has eth1" in check.out
