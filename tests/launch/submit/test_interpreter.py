"""Which Python a command starts, who chose it, and what a node must have for it. Pure, but for the environments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.job import CommandSettings
from muster.jobs.spec.python import absolute
from muster.jobs.spec.site import Site
from muster.launch.plan.interpreter import Interpreter, choose
from muster.launch.plan.program import needs
from support.plans import make_context, shared

OWN = "/opt/muster/bin/python"
CONTAINER = ["apptainer", "exec", "image.sif", "python"]
TRAIN = ["python3", "train.py", "--lr", "1"]


def context(argv: list[str], environ: dict[str, str] | None = None, **keys: Any) -> Any:
    made = make_context(settings=CommandSettings(argv=argv), **keys)
    return replace(made, interpreter=choose(made.job, made.site, OWN, environ or {}))


@pytest.fixture
def environments(tmp_path: Path) -> dict[str, str]:
    """A virtual and a conda environment, both active; the conda one was activated last."""
    for name in ("venv", "conda"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch(mode=0o755)
    path = f"{tmp_path}/conda/bin:{tmp_path}/venv/bin:/usr/bin"
    return {"VIRTUAL_ENV": f"{tmp_path}/venv", "CONDA_PREFIX": f"{tmp_path}/conda", "PATH": path}


def test_the_job_wins_over_the_site_the_site_over_the_active_environment_and_that_over_ours(environments) -> None:
    site = Site(python="/site/bin/python")
    found = [
        context(TRAIN, environments, python="/job/bin/python", site=site),
        context(TRAIN, environments, site=site),
        context(TRAIN, environments),
        context(TRAIN, {**environments, "PATH": "/usr/bin"}),
        context(TRAIN, {**environments, "PATH": "", "VIRTUAL_ENV": "/gone"}),
        context(TRAIN, {"VIRTUAL_ENV": "/gone"}),
    ]
    conda, venv = f"{environments['CONDA_PREFIX']}/bin/python", f"{environments['VIRTUAL_ENV']}/bin/python"
    wanted = ["/job/bin/python", "/site/bin/python", conda, venv, conda, OWN]
    assert [each.argv for each in found] == [[python, *TRAIN[1:]] for python in wanted]
    assert [shared(each, {"PATH": "/usr/bin"})["PATH"][0] for each in found] == [
        f"{Path(python).parent}:/usr/bin" for python in wanted
    ]
    whys = [each.interpreter.why for each in found]
    assert whys[:2] == ["job file: python", "site file: python"]
    assert ["CONDA_PREFIX" in whys[2], "VIRTUAL_ENV" in whys[3], "Muster's own" in whys[5]] == [True] * 3


def test_after_setup_lines_path_decides_unless_a_file_names_a_python(environments) -> None:
    for keys in ({"setup": ["module load x"]}, {"site": Site(setup=["module load x"])}):
        found = context(TRAIN, environments, **keys)
        assert found.argv == TRAIN
        assert shared(found)["PATH"][0] == f"{environments['CONDA_PREFIX']}/bin"
    assert context(TRAIN, environments, setup=["true"], python="/job/python").argv[0] == "/job/python"
    given = context(TRAIN, environments, env={"PATH": "/mine/bin"})
    assert (given.argv, shared(given)["PATH"], needs(given)) == (
        TRAIN,
        ("/mine/bin", "job file: env"),
        ("", "/srv/job/train.py"),
    )


def test_a_container_stands_before_the_script_and_leaves_path_alone() -> None:
    found = context(TRAIN, python=CONTAINER)
    assert found.argv == [*CONTAINER, *TRAIN[1:]]
    assert "PATH" not in shared(found, {"PATH": "/usr/bin"})
    assert needs(found) == ("apptainer", "")  # the script may lie in the image


def test_a_python_that_the_command_does_not_use_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"python: has no effect on a command that begins with 'bash'"):
        context(["bash", "x.sh"], python=CONTAINER)
    assert context(["torchrun", "x.py"], python="/job/bin/python").argv == ["torchrun", "x.py"]  # its folder is on PATH
    assert context(["bash", "x.sh"], site=Site(python=CONTAINER)).argv == ["bash", "x.sh"]  # of all jobs there


@pytest.mark.parametrize(
    ("argv", "keys", "wanted"),
    [
        (TRAIN, {}, (OWN, "/srv/job/train.py")),
        (["python", "-m", "train"], {}, (OWN, "")),
        (["torchrun", "train.py"], {}, ("torchrun", "")),
        (["./run.sh"], {}, ("/srv/job/./run.sh", "")),
        (["bash", "/a/run.sh"], {}, ("bash", "/a/run.sh")),
        (["torchrun", "train.py"], {"env": {"PATH": "/x"}}, ("", "")),
        (TRAIN, {"setup": ["git clone x"]}, ("", "")),
        (TRAIN, {"setup": ["git clone x"], "python": "/job/python"}, ("/job/python", "")),
    ],
)
def test_what_a_node_must_have_is_what_nothing_brings_later(argv, keys, wanted) -> None:
    assert needs(context(argv, **keys)) == wanted


def test_a_relative_interpreter_is_taken_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    folder = Path("/etc/site")
    assert absolute("venv/bin/python", folder) == "/etc/site/venv/bin/python"
    assert absolute(["~/venv/bin/python", "-u"], folder) == ["/home/u/venv/bin/python", "-u"]
    assert [absolute(each, folder) for each in ("python3.12", 3, [])] == ["python3.12", 3, []]


def test_a_submission_without_an_interpreter_starts_the_words_as_they_are() -> None:
    found = replace(make_context(settings=CommandSettings(argv=TRAIN)), interpreter=None)  # of an earlier version
    assert (found.argv, shared(found)["PATH"][0]) == (TRAIN, "/opt/muster/bin")
    assert Interpreter((), "/x", "").argv(TRAIN) == TRAIN
