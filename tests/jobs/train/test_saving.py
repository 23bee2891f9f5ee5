"""Saves beside the training, with real writer processes: what they cost when the writer or the disk fails."""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.jobs.basics.errors import RefusedError, StorageError
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.saver import Saver, Target
from muster.jobs.saving.schedule import SaveSchedule
from muster.jobs.spec.failover import CheckpointSettings
from muster.jobs.tensors.parts import TensorPart, whole_part
from muster.jobs.tensors.snapshot import MemorySnapshot
from muster.jobs.world.world import World
from support.checkpoints import Told

pytestmark = pytest.mark.slow

DEADLINE_S = 20.0


class Engine:
    """One tensor to save."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1000)

    def held_state(self) -> list[TensorPart]:
        return [whole_part("model/weight", self.weight)]


class Training:
    """A loop of steps that train nothing: step n makes the weight n."""

    def __init__(self, run: RunDir, *, patience_s: float = 10.0, target: Target | None = None, **settings: Any) -> None:
        run.attempt(0).path.mkdir(exist_ok=True)
        self.run, self.engine, self.told, self.done = run, Engine(), Told(), 0
        checkpoint = CheckpointSettings.model_validate({"every_steps": 1, "keep": 2, **settings})
        self.saver = Saver(
            target or Target(run, 0),
            checkpoint,
            self.engine.held_state,
            partial(MemorySnapshot, device=torch.device("cpu")),
            World(0, 1, None, torch.device("cpu")),
            SaveSchedule(checkpoint, 0),
            lambda done, parent, losses: {"step": done, "parent": parent, "losses": list(losses)},
            self.told,
            patience_s=patience_s,
        )

    def step(self, *, sound: bool = True) -> None:
        """Do a step; save after it if the settings say so. `sound`: its loss is a number."""
        self.done += 1
        self.engine.weight.fill_(float(self.done))
        if self.saver.is_due(self.done):
            self.saver.hear(self.done, [self.saver.note(self.done)], sound=sound)
        self.saver.step_done(self.done, [(self.done, 0.5)])

    def look_until(self, is_so: Callable[[], bool]) -> None:
        """Look after the save in flight, as steps do, until something is so."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline
            self.saver._look(wait_s=0.01)

    def settle(self) -> None:
        self.look_until(lambda: self.saver.flight is None)

    @property
    def writer_pid(self) -> int:
        assert self.saver.writer is not None
        return self.saver.writer.process.pid


def newest(run: RunDir) -> tuple[int, float]:
    """Return the step of the newest good checkpoint, and the one value in its weight."""
    chosen = newest_good(run)
    assert chosen is not None
    room = torch.empty(1000)
    with CheckpointReader(chosen.folder, chosen.manifest) as reader:
        data = bytearray(4000)
        reader.read_into(reader.piece("model/weight"), data)
        room = torch.frombuffer(data, dtype=torch.float32)
    (value,) = room.unique().tolist()
    return chosen.manifest.step, value


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


Start = Callable[..., Training]


@pytest.fixture
def start(run: RunDir) -> Iterator[Start]:
    """Return what starts a training in the run; at the end their writers are ended."""
    started = []

    def begin(**settings: Any) -> Training:
        started.append(Training(run, **settings))
        return started[-1]

    yield begin
    for training in started:
        training.saver.close()


def fill_disk(training: Training) -> None:
    """Let no file over 1 kB fit, as far as the training's writer is concerned."""
    resource.prlimit(training.writer_pid, resource.RLIMIT_FSIZE, (1024, 1024))


def test_what_is_saved_is_the_state_at_its_step_though_training_goes_on(run: RunDir, start: Start) -> None:
    training = start(every_steps=2)
    training.step()
    training.step()
    training.settle()
    os.kill(training.writer_pid, signal.SIGSTOP)  # it reads the memory when the weight has long changed
    training.step()
    training.step()
    training.engine.weight.fill_(99.0)
    os.kill(training.writer_pid, signal.SIGCONT)
    training.settle()
    assert newest(run) == (4, 4.0)
    _, saved = training.told.of("saved")
    assert (saved["step"], saved["checkpoint"]) == (4, "step-00000004.a000")
    assert saved["bytes"] >= 4000


def test_one_save_is_in_flight_and_others_are_left_out_and_counted(run: RunDir, start: Start) -> None:
    training = start()
    training.step()
    training.settle()
    os.kill(training.writer_pid, signal.SIGSTOP)  # before it has an order: it may be done with one in no time
    for _ in range(4):
        training.step()
    os.kill(training.writer_pid, signal.SIGCONT)
    training.settle()
    training.step()
    training.settle()
    assert [row["step"] for row in training.told.of("saved")] == [1, 2, 6]
    (missed,) = training.told.of("missed")
    assert (missed["step"], missed["missed"]) == (3, 0)
    assert missed["message"] == "skipped a checkpoint: the save of step 2 is still being written on rank 0"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "frozen"])
def test_a_writer_that_is_dead_or_frozen_costs_one_save(run: RunDir, start: Start, number: int) -> None:
    training = start()
    training.step()
    training.settle()
    training.saver.patience_s = 0.3
    os.kill(training.writer_pid, signal.SIGSTOP)
    training.step()
    if number == signal.SIGKILL:
        os.kill(training.writer_pid, number)
    training.settle()
    (missed,) = training.told.of("missed")
    assert (missed["step"], missed["missed"]) == (2, 1)
    training.saver.patience_s = 10.0
    training.step()
    training.settle()
    assert newest(run) == (3, 3.0)
    assert training.saver.missed == 0


def test_a_full_disk_leaves_the_training_and_the_last_good_one_and_the_third_miss_ends_it(
    run: RunDir, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    training = start(blocking=True)
    training.step()
    fill_disk(training)
    training.step()
    training.step()
    assert [row["missed"] for row in training.told.of("missed")] == [1, 2]
    assert capfd.readouterr().err.count("muster: step 2 was not saved (1 in a row): ") == 1
    with pytest.raises(StorageError, match=r"3 saves in a row failed; the last: .*File too large"):
        training.step()
    assert newest(run) == (1, 1.0)


def test_a_save_that_succeeds_begins_the_count_of_misses_anew(run: RunDir, start: Start) -> None:
    training = start(blocking=True)
    training.step()
    fill_disk(training)
    training.step()
    training.step()
    training.saver.writer.end()  # the next one finds room
    training.saver.writer = None
    training.step()
    assert newest(run)[0] == 4
    assert training.saver.missed == 0


def test_the_end_is_saved_though_it_is_no_multiple_and_a_save_was_in_flight(run: RunDir, start: Start) -> None:
    training = start(every_steps=2)
    for _ in range(3):
        training.step()
    training.saver.finish(3, [])
    assert newest(run) == (3, 3.0)
    assert [row["step"] for row in training.told.of("saved")] == [2, 3]


def test_the_end_is_tried_again_when_its_writer_dies_and_then_is_a_storage_error(run: RunDir, start: Start) -> None:
    training = start()
    training.step()
    training.settle()
    training.done += 1
    os.kill(training.writer_pid, signal.SIGKILL)
    training.saver.finish(2, [])
    assert newest(run)[0] == 2


def test_an_end_that_cannot_be_saved_is_a_storage_error_that_names_the_last_good_one(run: RunDir, start: Start) -> None:
    training = start(every_steps=2)
    training.step()
    training.step()
    training.settle()
    training.step()
    fill_disk(training)
    message = r"after step 3 could not be saved; the last valid checkpoint: step-00000002\.a000"
    with pytest.raises(StorageError, match=message):
        training.saver.finish(3, [])


def test_blocking_waits_for_the_commit_at_every_save(run: RunDir, start: Start) -> None:
    training = start(blocking=True)
    for step in (1, 2, 3):
        training.step()
        assert newest(run) == (step, float(step))
    names = {path.name for path in run.checkpoints.iterdir()}
    assert names == {"step-00000002.a000", "step-00000003.a000"}, "retention keeps two"


def test_a_step_whose_loss_is_no_number_takes_no_good_checkpoint_away(run: RunDir, start: Start) -> None:
    training = start(blocking=True)
    training.step()
    training.step()
    for _ in range(3):
        training.step(sound=False)
    assert newest(run) == (2, 2.0)
    training.step()
    assert newest(run) == (6, 6.0)


def test_an_attempt_that_a_newer_one_has_replaced_ends(run: RunDir, start: Start) -> None:
    training = start()
    training.step()
    training.settle()
    run.attempt(1).path.mkdir()
    training.step()
    with pytest.raises(RefusedError, match="attempt 1 has begun"):
        training.settle()


def test_the_writer_ends_with_its_rank(run: RunDir, start: Start) -> None:
    training = start()
    training.step()
    training.settle()
    writer = training.saver.writer
    assert writer is not None
    writer._socket.close()
    assert writer.process.wait(timeout=DEADLINE_S) == 0


def test_meta_of_a_checkpoint_names_its_parent_and_the_last_losses(run: RunDir, start: Start) -> None:
    training = start(blocking=True)
    training.step()
    training.step()
    chosen = newest_good(run)
    assert chosen is not None
    assert chosen.manifest.meta == {"step": 2, "parent": "step-00000001.a000", "losses": [[2, 0.5]]}
    assert json.loads(json.dumps(chosen.manifest.meta)) == chosen.manifest.meta


@pytest.mark.parametrize(
    ("settings", "saved", "begun", "at_once"),
    [
        ({"every_steps": 20}, 0, 20, True),  # the save of step 20 was in flight
        ({"every_steps": 20}, 0, 0, True),  # or the loss came before it began
        ({"every_steps": 20}, 20, 20, False),
        ({"every_steps": 1000}, 0, 0, False),
        ({"every_steps": 1000}, 0, 15, True),  # somebody asked for it
        ({"every_steps": None, "every_s": 1000.0}, 7, 15, True),
        ({"every_steps": None, "every_s": 1000.0}, 15, 15, False),
        ({"every_steps": 20}, None, 0, False),  # a restart, from the disk
    ],
)
def test_ranks_that_continue_in_place_make_up_for_an_interrupted_save_at_once(
    run: RunDir, settings: dict[str, Any], saved: int | None, begun: int, at_once: bool
) -> None:
    target = Target(run, 0, step=21, saved=saved, begun=begun)
    training = Training(run, target=target, **settings)
    training.done = 21
    training.step()
    training.settle()
    assert [(each["report"], each["step"]) for each in training.told.rows] == [("saved", 22)] * at_once
    training.step()
    training.settle()
    assert training.saver.due != training.done + 1
    assert training.saver.abandon() == (22 if at_once else begun)
