"""A made model is counted without memory for its numbers: against anatomies of built-in models, and what ranks hold."""

import itertools
import math
import os
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from muster.collectives_bench.cost.memory import memories_of
from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.anatomy import ModelOperation, anatomy
from muster.jobs.models.counted import Counted, read
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.runfolder.memory_rows import KINDS
from muster.jobs.spec.job import Job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.memory.count import count
from muster.jobs.train.memory.held import bytes_by_kind
from muster.jobs.train.trainer import build_trainer
from muster.jobs.world.world import World
from muster.launch.bench.counting import OwnCode, own_code
from muster.launch.bench.loads import load_of
from muster.launch.bench.own_split import own_split

OWN = Path(CODE_ROOT, "muster/jobs/examples/own")
NET = {"make": "model/net.py:build", "args": {"width": 128, "blocks": 4}}
JOB = {"model": NET, "data": "digits", "batch_size": 256, "steps": 3, "optimizer": {"name": "adamw"}, "device": "cpu"}
CASES = {
    **{mode: JOB | {"mode": mode} for mode in ("bucketed", "zero1", "zero2", "zero3", "allreduce", "1f1b")},
    "tensor": JOB | {"mode": "tensor", "model": NET | {"plan": "model/net.py:plan"}},
}
LIVE = ("allreduce", "1f1b", "tensor")  # gradients go with their step, and so all tensors of a step can be seen
BUILT_IN = """
from dataclasses import replace
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.vgg import build_vgg

def gpt(**sizes): return build_gpt(replace(GPT_SHAPES["gpt-nano"], **sizes), 0)
def vgg(): return build_vgg(VGG_SHAPES["vgg11"], 0)
"""
OWN_CODE = """
import torch
from torch import nn

SCALE = torch.tensor([2.0])

class Net(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.sizes = [int(each.item()) for each in torch.tensor([4.0, 6.0])]  # needs numbers
        self.reads = reads
        self.norm = nn.BatchNorm2d(3)
        self.inner = nn.Linear(3, 6)
        self.inner.bias.requires_grad_(False)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)  # never calls its out_proj
        self.head = nn.Linear(6, 10)

    def forward(self, images):
        x = self.inner(self.norm(images * SCALE).flatten(2).transpose(1, 2)[:, ::16])
        if self.reads and x.sum().item() > 0:
            x = x + 1
        return self.head(self.attention(x, x, x)[0].mean(1))

def build(reads=False): return Net(reads)

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, both=False):
        super().__init__(params, {"lr": lr, "both": both})

    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = {"steps": 1, "rows": torch.zeros(2)}
                self.state[each] |= {name: torch.zeros_like(each) for name in "ab"[: 1 + group["both"]]}
"""


def settings(**changes: object) -> TrainSettings:
    return TrainSettings.model_validate({"data": "digits", "mode": "single", "steps": 1, **changes})


def elements(units: list[tuple[ModelOperation, ...]]) -> list[int]:
    return [sum(tensor.elements for part in unit for tensor in part.tensors) for unit in units]


def counted(given: TrainSettings) -> Counted:
    return read(count(given)["model"])


@pytest.mark.parametrize(
    ("make", "sizes"), [("gpt", {}), ("gpt", {"norm": "layer", "bias": True, "tied": False}), ("vgg", {})]
)
def test_a_built_in_model_that_a_user_s_file_makes_has_the_anatomy_that_is_written_down(
    tmp_path, monkeypatch, make, sizes
):
    monkeypatch.chdir(tmp_path)
    Path("built_in.py").write_text(BUILT_IN)
    more, shape = {}, VGG_SHAPES["vgg11"]
    if make == "gpt":
        shape = replace(GPT_SHAPES["gpt-nano"], context=32, vocabulary=128, **sizes)
        more = {"args": {"context": 32, "vocabulary": 128, **sizes}, "context": 32, "vocabulary": 128}
    found = counted(settings(model={"make": f"built_in.py:{make}", **more}, data="synthetic"))
    assert (found.no_activations, found.no_layers) == ("", "")
    model, expected = found.model, anatomy(shape)
    assert sorted(each.shape for each in model.tensors) == sorted(each.shape for each in expected.tensors)
    assert math.isclose(model.saved_bytes(4), expected.saved_bytes(4), rel_tol=1e-3)
    assert math.isclose(model.flops, expected.flops + sum(part.backward_flops for part in expected.parts), rel_tol=0.03)
    if make == "gpt":
        assert [name for name, _ in model.layers()] == [name for name, _ in expected.layers()]
        elements = [
            [sum(t.elements for p in unit for t in p.tensors) for unit in each.units()] for each in (model, expected)
        ]
        assert elements[0] == elements[1]
        assert [max(p.outputs for p in parts) for _, parts in model.layers()][:-1] == [
            max(p.outputs for p in parts) for _, parts in expected.layers()
        ][:-1]


def hold(world: World, cases: dict) -> list[tuple[dict[str, int], int]]:
    """Train in one mode after the other; return what is held after two steps, and the most tensors of the third."""
    os.chdir(OWN)
    found = []
    for job in map(TrainSettings.model_validate, cases.values()):
        trainer = build_trainer(job, open_data(job), world)
        steps, engine = trainer.own_steps(), trainer.engine
        for step in range(2):
            engine.train_step(step, steps[step].shards)
        held = bytes_by_kind(engine.held_tensors())
        engine.optimizer.zero_grad(set_to_none=True)
        before, shards = sum(bytes_by_kind(engine.held_tensors()).values()), steps[2].shards
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine.train_step(2, shards)
        changes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        found.append((held, before + max(itertools.accumulate(changes))))
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_what_ranks_hold_of_a_made_model_is_what_the_formulas_say(on_ranks, monkeypatch):
    monkeypatch.chdir(OWN)
    wrong = []
    found = on_ranks(2, hold, cases=CASES)
    for number, (mode, given) in enumerate(CASES.items()):
        job = Job(name="m", kind="train", nodes=2, settings=TrainSettings.model_validate(given))
        own = OwnCode(counted(job.settings))
        every = memories_of(*own_split(job.settings, load_of(job, ranks=2, backend="gloo", own=own)))
        for rank in range(2):
            expected = every[rank * len(every) // 2]
            held, most = found[rank][number]
            wrong += [
                f"{mode}, rank {rank}: {kind} {held[kind]}, expected {getattr(expected, kind)}"
                for kind in KINDS
                if abs(held[kind] - getattr(expected, kind)) > 0.01 * getattr(expected, kind)
            ]
            if mode in LIVE and not 0.8 < most / expected.total < 1.15:
                wrong.append(f"{mode}, rank {rank}: {most} at most, expected {expected.total}")
    assert wrong == []


def test_what_needs_numbers_is_built_on_the_cpu_and_a_forward_that_reads_them_leaves_activations_unknown(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("needs_numbers.py").write_text(OWN_CODE)
    for reads in (False, True):
        model = {"make": "needs_numbers.py:build", "args": {"reads": reads}}
        found = counted(settings(model=model, optimizer={"make": "needs_numbers.py:Lion", "args": {"both": reads}}))
        expected = 2 * 3 + (3 * 6 + 6) + (18 * 6 + 18 + 6 * 6 + 6) + 6 * 10 + 10
        assert (found.model.elements, found.model.trained) == (expected, expected - 6)
        assert sum(part.buffer_bytes for part in found.model.parts) == 2 * 3 * 4 + 8
        assert "is not an nn.Sequential" in found.no_layers
        assert found.why_not("tensor") == "the job has no model.plan"
        assert math.isnan(found.model.saved_bytes(4)) is reads
        assert ("needs_numbers.py, line 20" in found.no_activations) is reads


def test_a_user_s_optimizer_counts_by_the_state_of_one_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lions.py").write_text(OWN_CODE)
    for both, state in ((False, 4), (True, 8)):
        given = settings(model="vgg11", optimizer={"make": "lions.py:Lion", "args": {"both": both}})
        assert count(given) == {"model": None, "state_bytes": state}


def test_a_python_without_torch_is_one_message(tmp_path):
    venv.create(tmp_path / "bare")
    job = Job(name="m", kind="train", settings=TrainSettings.model_validate(JOB), workdir=str(OWN))
    python = str(tmp_path / "bare/bin/python")
    with pytest.raises(RefusedError, match="has no torch; install torch there, or set python: to the ranks' Python"):
        own_code(job.model_copy(update={"python": python}), job.settings)
