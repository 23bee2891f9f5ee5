"""The scripts of `jobs/examples/own/`: each loses a rank, is stopped and resumed, and ends as if nothing had been."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file

from conftest import asked
from muster.jobs.basics import exits
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.load import EXAMPLES
from muster.launch.cli import main
from support.ahead import Ahead, parameters_of
from support.bench import free_port
from support.live import LiveRun, wait_until
from support.programs import Ask, Programs
from support.soak import only_some
from support.transcripts import REPOSITORY, fences, pattern

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.timeout(250), pytest.mark.slow]

OWN = EXAMPLES / "own"
# torchrun 2.13 keeps its store when it restarts workers; gloo then dials the addresses of those that died.
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
AGAIN = {"ddp": 2, "epochs": 3, "fsdp2": 1, "without": 2}  # the ranks of the last attempt
KEPT = ["ddp", "fsdp2"]  # torchrun below kills a rank of epochs.py, too, and continues it on more ranks
EPOCHS = 16  # enough to be stopped in, however slow this machine is to say so
WORDS = {
    "ddp": ["--steps", "1000"],
    "epochs": ["--epochs", str(EPOCHS)],
    "fsdp2": ["--steps", "150"],
    "without": ["--steps", "1000"],
}
ENDS = {"fsdp2"}  # ends with its killed rank, and is resumed; the others restart, and are stopped
EVERY = {"ddp": 300, "epochs": 20, "fsdp2": 20, "without": 20}  # steps between two saves


class Started(LiveRun):
    """A process of the user's, with the folder of its runs; it outlives the test during which it was started."""

    started: ClassVar[list[LiveRun]] = []

    def __init__(self, root: Path, *argv: str, **more: str) -> None:
        self.root = root
        root.parent.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            argv,
            cwd=root.parent,
            env={**ENVIRON, "MUSTER_RUNS": str(root), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(self)

    def wait_for_saved(self, attempt: int) -> None:
        """Wait until an attempt has saved: a checkpoint, or the file of a script that saves by itself."""
        where = "checkpoints/*.a%03d/MANIFEST.json" % attempt  # noqa: UP031 (as the folder's name is spelt)
        own = self.run.attempt(attempt).out(0)
        done = lambda: any(self.run.path.glob(where)) or (own.is_file() and ", saved" in own.read_text())  # noqa: E731
        wait_until(lambda: done() or self.process.poll() is not None, f"a save of attempt {attempt}")

    def logged_beyond(self, saved: int) -> bool:
        """Say whether a step is logged that comes after a save."""
        return any(row["step"] > saved for row in read_lines(self.run.metrics))


@dataclass
class Life:
    """How a run was hurt: the code it was stopped with, and how its resume ended."""

    run: RunDir
    stopped: int
    code: int
    said: str

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return list(read_lines(self.run.attempts))

    def last_line(self) -> str:
        """The last line of rank 0."""
        return self.run.attempt(len(self.attempts) - 1).out(0).read_text().splitlines()[-1]


def muster(*words: str) -> list[str]:
    return [sys.executable, "-m", "muster", *words]


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]


def life(name: str, root: Path) -> Life:
    """Start an example, kill a rank once there is a checkpoint, stop the run after its next one, and resume it.

    A run without restarts need not be stopped.
    """
    options = [
        "-n",
        "2",
        *([] if name in ENDS else ["--restart", "2"]),
        "--set",
        "threads_per_rank=1",
        "--set",
        f"checkpoint.every_steps={EVERY[name]}",
    ]
    live = Started(root, *muster("run", *options, str(OWN / f"{name}.py"), *WORDS[name]))
    live.wait_for_saved(0)
    if name == "ddp":  # of the steps that are done again some are logged, and so compared
        wait_until(lambda: live.logged_beyond(EVERY[name]), "a logged step to do again")
    os.kill(live.pid_of(1), signal.SIGKILL)
    if name not in ENDS:
        live.wait_for("replayed") if name == "ddp" else live.wait_for_saved(1)
        live.interrupt()
    stopped = live.end()
    resumed = Started(root, *muster("resume", "-n", str(AGAIN[name])))
    code = resumed.end()
    return Life(live.run, stopped, code, live.out + resumed.out)


def ended(ask: Ask, root: Path, name: str, words: list[str], *places: dict[str, str]) -> str:
    """Run an example in a fork for each place; return what the first fork prints."""
    root.parent.mkdir()
    programs = Programs(ask, root.parent)
    environs = [{**ENVIRON, "MUSTER_RUNS": str(root), **place} for place in places]
    started = [programs.start(OWN / f"{name}.py", *words, cwd=root.parent, env=environ) for environ in environs]
    done = [each.wait() for each in started]
    assert [each.returncode for each in done] == [0] * len(places), done
    return done[0].stdout


def undisturbed(ask: Ask, root: Path, name: str, words: str) -> str:
    """What an example prints on two ranks that are told what torchrun tells; it is started in a folder of its own."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return ended(ask, root, name, WORDS[words], *({**group, "RANK": each, "LOCAL_RANK": each} for each in "01"))


def elsewhere(root: Path) -> Started:
    """`epochs.py` alone until it is stopped, then on two ranks of torchrun, one of which is killed."""
    words = [str(OWN / "epochs.py"), "--epochs", "6"]
    alone = Started(root, sys.executable, *words)
    wait_until(lambda: any(alone.run.attempt(0).path.glob("metrics-*.jsonl")), "the first rows")
    alone.interrupt()
    assert alone.end() == exits.STOPPED, alone.out
    found = re.search(r"^muster: to continue: MUSTER_RESUME=(\S+) ", alone.out, re.MULTILINE)
    assert found, alone.out
    started = Started(root, *torchrun("--max-restarts", "1", *words), MUSTER_RESUME=found[1])
    wait_until(lambda: any(alone.run.attempt(1).path.glob("metrics-*1.jsonl")), "the rows of attempt 1")
    pids = [each for each in children(started.process.pid) if variable(each, "RANK") is not None]
    ranks = {variable(pid, "RANK"): pid for pid in pids}
    os.kill(ranks["0"], signal.SIGUSR1)
    wait_until(lambda: any(alone.run.checkpoints.glob("*.a001/MANIFEST.json")), "a checkpoint")
    os.kill(ranks["1"], signal.SIGKILL)
    started.end()
    return started


def as_steps_of_srun(ask: Ask, root: Path) -> RunDir:
    """`ddp.py` in the environment of a step of two tasks, and nothing else that says where the ranks meet."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    ended(ask, root, "ddp", ["--steps", "30"], *({**step, "SLURM_PROCID": one, "SLURM_LOCALID": one} for one in "01"))
    return RunDir(next(root.glob("[!.]*")))


def alone(ask: Ask, root: Path) -> RunDir:
    """`fsdp2.py` in one process, as it is."""
    ended(ask, root, "fsdp2", WORDS["fsdp2"], {})
    return RunDir(next(root.glob("[!.]*")))


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def variable(pid: int, name: str) -> str | None:
    """A variable of a process's environment."""
    pairs = (each.partition("=") for each in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return next((value for key, _, value in pairs if key == name), None)


@pytest.fixture(scope="module")
def ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rank_server: subprocess.Popen[str]
) -> Iterator[Callable[[str], Any]]:
    """What is done ahead of the tests, by name."""
    folder, ask = tmp_path_factory.mktemp("own"), partial(asked, rank_server)
    chosen = parameters_of(request, "test_a_run_survives_a_killed_rank_and_a_stop", "name")
    work = {name: (life, name, folder / name / "runs") for name in AGAIN if name in (*KEPT, *chosen)}
    if "without" in chosen:
        work["without undisturbed"] = (undisturbed, ask, folder / "undisturbed" / "runs", "without", "without")
    work |= {
        "ddp undisturbed": (undisturbed, ask, folder / "plain" / "runs", "plain", "ddp"),
        "elsewhere": (elsewhere, folder / "elsewhere" / "runs"),
        "srun": (as_steps_of_srun, ask, folder / "srun" / "runs"),
        "alone": (alone, ask, folder / "alone" / "runs"),
    }
    found: Ahead[str, Any] = Ahead(lambda key: work[key][0](*work[key][1:]), list(work))
    yield found.result
    found.close()
    Started.end_all()


@pytest.mark.parametrize("name", only_some(list(AGAIN), KEPT))
def test_a_run_survives_a_killed_rank_and_a_stop(name: str, ahead: Callable[[str], Any]) -> None:
    lived: Life = ahead(name)
    first, *_, last = lived.attempts
    assert (first["first"]["rank"], first["first"]["signal"]) == (1, "SIGKILL")
    assert (last["class"], last["world_size"], lived.code) == ("done", AGAIN[name], 0), lived.said
    if name in ENDS:
        assert (len(lived.attempts), lived.stopped) == (2, exits.SIGNAL_BASE + signal.SIGKILL), lived.said
        assert last["from_step"] >= EVERY[name]
        return
    assert lived.stopped == exits.STOPPED, lived.said
    _, second, third = lived.attempts
    assert [each["class"] for each in (first, second, third)] == ["signal", "stopped", "done"]
    assert [each["world_size"] for each in (first, second, third)] == [2, 2, AGAIN[name]]
    if name == "without":
        assert len(re.findall(r"^continues after step \d+$", lived.said, re.MULTILINE)) == 2
        assert re.search(r"^rank 0 stops after step \d+: stopped: ", lived.said, re.MULTILINE), lived.said
        return
    assert second["saved_step"] == second["last_step"]  # the drain saved
    assert (second["from_step"] >= EVERY[name], third["from_step"]) == (True, second["saved_step"])
    rows = {row["step"]: row for row in read_lines(lived.run.metrics) if "evaluation" not in row}
    assert sorted(rows) == list(range(1, third["last_step"] + 1))


def test_the_plain_script_and_the_one_that_was_hurt_end_with_the_same_bits(ahead: Callable[[str], Any]) -> None:
    assert ahead("ddp").last_line() == ahead("ddp undisturbed").splitlines()[-1]


def test_the_page_shows_what_happens_when_something_fails(ahead: Callable[[str], Any]) -> None:
    page = (REPOSITORY / "docs/own-code.md").read_text(encoding="utf-8")
    (shown,) = (lines for before, _, lines in fences(page) if before == "<!-- test:lived ddp -->")
    assert pattern(tuple(shown)).fullmatch(ahead("ddp").said), ahead("ddp").said


@pytest.mark.soak
def test_a_script_without_a_session_ends_with_the_same_bits(ahead: Callable[[str], Any]) -> None:
    assert ahead("without").last_line() == ahead("without undisturbed").splitlines()[-1]


def test_shards_of_two_ranks_go_on_on_one(ahead: Callable[[str], Any]) -> None:
    runs = [ahead("fsdp2").run, ahead("alone")]
    losses, wanted = ({row["step"]: row["loss"] for row in read_lines(each.metrics)} for each in runs)
    assert losses.keys() == wanted.keys()
    assert list(losses.values()) == pytest.approx(list(wanted.values()), rel=1e-3)


@pytest.mark.soak
def test_every_sample_of_an_epoch_comes_once_on_other_ranks_too(ahead: Callable[[str], Any]) -> None:
    rows = {row["step"]: row for row in read_lines(ahead("epochs").run.metrics) if "evaluation" not in row}
    assert sum(row["samples"] for row in rows.values()) == EPOCHS * 3001
    accuracies = [row["accuracy"] for row in read_lines(ahead("epochs").run.metrics) if "evaluation" in row]
    again = len(ahead("epochs").attempts) - 1  # an epoch whose end was not saved is evaluated once more
    assert EPOCHS <= len(accuracies) <= EPOCHS + again
    assert accuracies[-1] > 0.9
    assert (ahead("epochs").run.files / "model.pt").is_file()


def test_alone_then_under_torchrun_whose_restart_goes_on(ahead: Callable[[str], Any]) -> None:
    started: Started = ahead("elsewhere")
    assert started.process.returncode == 0, started.out
    run = started.run
    assert run.attempt_numbers() == [0, 1, 2]
    rows = {row["step"]: row for row in read_lines(run.metrics) if "evaluation" not in row}
    assert sum(row["samples"] for row in rows.values()) == 6 * 3001
    assert {row["attempt"] for row in rows.values()} == {0, 1, 2}
    assert "continues from step-" in started.out


def test_srun_and_nobody_need_no_variables_of_torchrun(ahead: Callable[[str], Any]) -> None:
    rows = list(read_lines(ahead("srun").metrics))
    assert (rows[-1]["step"], rows[-1]["samples"]) == (30, 64)
    (newest,) = ahead("alone").checkpoints.iterdir()
    assert newest.name == "step-00000150.a000"


def test_the_commands_that_look_show_a_run_of_ones_own(
    ahead: Callable[[str], Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = ahead("ddp").run

    def said(*words: str) -> str:
        assert main([*words, "--runs", str(run.path.parent)]) == 0
        return capsys.readouterr().out

    assert re.search(r"^step +1000 of 1000, loss 0\.\d+, ", said("status"), re.MULTILINE)
    assert re.search(r"1000 of 1000 +1000 +0\.\d+ +done +\S+ [KM]B$", said("list"), re.MULTILINE)
    why = said("why")
    assert "rank 1 on node 0" in why
    assert re.search(r"losses of \d+ steps that were repeated are identical", why), why
    (newest, *_) = json.loads(said("checkpoint", "list", "--json"))
    assert (newest["step"], newest["world_size"]) == (1000, 2)
    assert "good" in said("checkpoint", "verify")
    assert re.search(r"^optimizer/0\.weight/exp_avg +F32 +\[256, 64\]", said("checkpoint", "show"), re.MULTILINE)
    said("checkpoint", "export", "-o", str(tmp_path / "model.safetensors"))
    exported = load_file(tmp_path / "model.safetensors")
    assert sorted(exported) == ["0.bias", "0.weight", "3.bias", "3.weight"]
