"""Every example of `jobs/examples/` runs through `muster run`, writes what it should; some in fewer, smaller steps."""

import json
import math
import os
import random
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.files import read_lines
from muster.jobs.data.datafiles import prepare_python_source, write_facts
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.load import EXAMPLES, load_job
from muster.jobs.spec.train import TrainSettings
from muster.launch.common.kinds import KINDS
from support.ahead import Ahead, parameters_of
from support.programs import Programs
from support.soak import only_some

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.timeout(250), pytest.mark.slow]
Ended = subprocess.CompletedProcess[str]
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))

# Five steps show that these learn; fewer show that the others run.
LEARN = {"gpt-nano", "gpt-terapipe", "single", "vgg11", "vgg11-ddp", "vgg11-gather-scatter"}
SMALL = {name: ["--set", "train.batch_size=16"] for name in ("cifar10", "exact", "vgg11-bucketed")}
STEPS = {"cifar10": 1, "exact": 2, "vgg11-bucketed": 2, **dict.fromkeys(LEARN, 5)}
# Transcripts of pages, in test_readme.py, run the first three, and other tests train in the modes of the others.
SOAKED = {"bench", "failover", "hello", "single", "vgg11-ddp", "vgg11-gather-scatter"}


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write small data sets as the prepared ones are laid out: CIFAR-10 of 64 + 16 images, one package as text."""
    root = tmp_path_factory.mktemp("data")
    (root / "cifar10").mkdir()
    draw = random.Random(0)
    for name, images in (("train", 64), ("test", 16)):
        rows = b"".join(bytes([draw.randrange(10)]) + draw.randbytes(3072) for _ in range(images))
        (root / "cifar10" / f"{name}.u8").write_bytes(rows)
    write_facts(root / "cifar10" / "meta.json", {"source": "made for a test"})
    prepare_python_source(root, Path(sysconfig.get_path("stdlib")) / "json")
    return root


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, data_root: Path, programs: Programs
) -> Iterator[Ahead[str, tuple[Ended, Path]]]:
    """How `muster run` of each example ended, and its folder of runs."""

    def run(name: str) -> tuple[Ended, Path]:
        runs = data_root / "runs" / name
        argv = ["-m", "muster", "run", str(EXAMPLES / f"{name}.yaml"), "--runs", str(runs)]
        if name in STEPS:
            argv += ["--set", "train.epochs=null", "--set", f"train.steps={STEPS[name]}", *SMALL.get(name, [])]
        environ = {**os.environ, "MUSTER_DATA": str(data_root)}
        return programs.start(*argv, env=environ).wait(200.0), runs

    ahead = Ahead(run, parameters_of(request, "test_example", "name"))
    yield ahead
    ahead.close()


@pytest.mark.parametrize("name", only_some(NAMES, [name for name in NAMES if name not in SOAKED]))
def test_example(name: str, ended: Ahead[str, tuple[Ended, Path]]) -> None:
    done, runs = ended.result(name)
    assert done.returncode == 0, done.stderr
    run = RunDir(next(runs.glob("[!.]*")))
    (verdict,) = read_lines(run.attempts)
    assert verdict["class"] == "done"
    job = load_job(EXAMPLES / f"{name}.yaml", KINDS).job
    assert isinstance(job.ranks_per_node, int)
    outputs = [run.attempt(0).out(rank) for rank in range(job.nodes * job.ranks_per_node)]
    assert all(path.is_file() for path in outputs)
    if isinstance(job.settings, TrainSettings):
        rows = [row for row in read_lines(run.metrics) if "evaluation" not in row]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert all(math.isfinite(row["loss"]) for row in rows)
        assert len(rows) < 5 or rows[-1]["loss"] < rows[0]["loss"]
        assert any("evaluation" in row for row in read_lines(run.metrics))
    elif isinstance(job.settings, BenchSettings) and not job.settings.is_hello:
        assert "# verdict: OK" in outputs[0].read_text()
        *_, last = read_lines(run.attempt(0).bench)
        assert last["record"] == "end"
    else:
        assert all(path.read_text().strip() for path in outputs)
    assert json.loads(run.attempt(0).placement.read_text())
