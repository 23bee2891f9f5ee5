"""What is refused before anything is started, because it cannot work on this machine."""

import argparse
import sys
from pathlib import Path

import pytest

from jobs.errors import RefusedError, UsageError
from launch import prepare as module
from launch.plan import Machine, shared_environment
from launch.prepare import Prepared, prepare

COMMAND = "command: ['true']\n"
IMAGES_FOR_ALL = "train: {model: vgg11, data: cifar10, batch_size: 300}\n"
IMAGES = "train: {model: vgg11, data: cifar10}\n"


def prepared(path: Path, text: str, *, here: bool = True) -> Prepared:
    path.write_text(text)
    args = argparse.Namespace(job=str(path), overrides=[], name=None, site=None, runs=None)
    return prepare(args, here=here)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path / "job.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 257\n" + COMMAND, "nodes: must be at most 256 on one machine, got 257"),
        (
            "nodes: 2\nranks_per_node: 513\n" + COMMAND,
            "ranks_per_node: must be such that one machine has at most 1024 ranks, got 2 nodes x 513",
        ),
        ("workdir: nowhere\n" + COMMAND, "workdir: {folder}/nowhere: no such folder"),
        ("workdir: job.yaml\n" + COMMAND, "workdir: {folder}/job.yaml: is not a folder"),
        (IMAGES, "train.data: {folder}/data/cifar10: cifar10 is not on this machine; run: muster data cifar10"),
        ("env: {MUSTER_DATA: /empty}\n" + IMAGES, "train.data: /empty/cifar10: cifar10 is not on this machine"),
        ("train: {model: gpt-nano, data: {text: no.txt}}\n", "train.data.text: {folder}/no.txt: no such file"),
        ("nodes: 2\ntrain: {model: vgg11, data: digits, batch_size: 1}\n", "train.batch_size: 1 is less than"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_with_file_and_key(job: Path, text: str, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        prepared(job, text)
    assert str(caught.value).startswith(f"{job}: {message.format(folder=job.parent)}")
    assert "\n" not in str(caught.value)


def test_lines_for_other_machines_are_not_held_to_what_this_one_has(job: Path) -> None:
    text = "nodes: 300\nworkdir: /nowhere\n" + IMAGES_FOR_ALL
    assert len(prepared(job, text, here=False).context.placement.nodes) == 300


def test_without_a_job_file_the_word_that_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match="JOB: is empty; name a job file"):
        prepare(argparse.Namespace(job=""))


@pytest.mark.parametrize(
    ("machine", "nodes", "ranks"),
    [
        (Machine("box", tuple(range(8))), 2, [4, 4]),
        (Machine("box", tuple(range(3))), 2, [2, 1]),
        (Machine("box", (0, 1)), 3, [1, 1, 1]),
        (Machine("box", tuple(range(64)), ("a", "b", "c", "d")), 2, [2, 2]),
    ],
)
def test_pretend_nodes_share_the_slots_of_their_machine(
    job: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine, nodes: int, ranks: list[int]
) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: machine)
    placement = prepared(job, f"nodes: {nodes}\nranks_per_node: slots\n" + COMMAND).context.placement
    assert [node.ranks for node in placement.nodes] == ranks


def with_site(job: Path, site_text: str) -> Prepared:
    site = job.parent / "site.yaml"
    site.write_text(site_text)
    job.write_text(COMMAND)
    return prepare(argparse.Namespace(job=str(job), overrides=[], name=None, site=str(site), runs=None))


def test_the_site_files_interpreter_and_data_folder_are_those_of_the_ranks(job: Path) -> None:
    context = with_site(job, f"interpreter: {sys.executable}\ndata: sets\n").context
    assert context.python == sys.executable
    values = {each.name: (each.value, each.origin) for each in shared_environment(context, {}, 1)}
    assert values["MUSTER_DATA"] == (str(job.parent / "sets"), "site file: data")


def test_a_site_interpreter_that_cannot_be_run_is_refused(job: Path) -> None:
    with pytest.raises(RefusedError, match=r"site file: interpreter: .*no-python: cannot be run here"):
        with_site(job, f"interpreter: {job.parent}/no-python\n")
