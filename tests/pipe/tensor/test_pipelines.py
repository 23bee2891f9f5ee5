"""Split models in a pipeline: stages of two ranks each give the steps of one process, with every schedule."""

import pytest
import torch

from muster.jobs.train.models.tensor_plan import loss_of
from muster.jobs.world.world import World
from muster.pipe.mesh import Mesh
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.tables import schedule
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.tensor.linear import ColumnLinear
from support.tensor_parallel import WITHIN, Case, batch, build, far, part_of, split

pytestmark = pytest.mark.ranks

RUNS = [("1f1b", None), ("1f1b", 1), ("zb1p", None), ("zb1p", 1), ("interleaved", 0), ("zbv", None)]


def wrong_pipelines(world: World) -> list[str]:
    mesh = Mesh(pipe=2, tensor=2)
    groups = mesh.groups(world.group)
    apart = World(mesh.tensor_rank(world.rank), 2, groups.tensor, world.device)
    tokens, targets = batch(0, world.device, samples=8)
    problems = []
    for name, sequence in RUNS:
        case = Case(tied=True, sequence=sequence)
        whole = build(case)
        wanted = whole(tokens, targets)
        wanted.backward()
        made = split(build(case), case, apart)
        loss = loss_of(made.module.head)
        pipeline = Pipeline(made.module, schedule(name, 2, 4), loss=loss, process_group=groups.pipe)
        found = pipeline.step(tokens, targets)
        said = far(found, wanted.detach(), "loss", WITHIN)
        for each, parameter in pipeline.module.named_parameters():
            gradient = part_of(whole.get_parameter(each).grad, made, pipeline.tied.get(each, each))
            said += far(parameter.grad, gradient, f"{each}: gradient", WITHIN)
        problems += [f"{name}, sequence {sequence}: {each}" for each in said + wrong_queue(pipeline)]
        pipeline.module.eval()
        with torch.no_grad():
            problems += far(pipeline.evaluate(tokens), whole(tokens), "logits", WITHIN)
    return problems


def wrong_queue(pipeline: Pipeline) -> list[str]:
    """Split layers leave their weight gradients to the pipeline's queue, if it has one."""
    queues = [each.weight_queue for each in pipeline.module.modules() if isinstance(each, ColumnLinear)]
    wanted = type(None) if pipeline.queue is None else WeightQueue
    return [f"weights' gradients are kept by {each}" for each in queues if not isinstance(each, wanted)]


def test_stages_of_split_layers_step_as_one_process(on_ranks):
    assert on_ranks(4, wrong_pipelines) == [[]] * 4
