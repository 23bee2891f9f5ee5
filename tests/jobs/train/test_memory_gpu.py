"""What ranks on GPUs say of their memory, through `muster run`. `pytest -m gpu` on a machine that has at least two."""

from pathlib import Path

import pytest

from muster.jobs.runfolder.memory_rows import KINDS
from muster.launch.look.memories import formula_of, read_memories
from support.live import LiveRun

pytestmark = [pytest.mark.command, pytest.mark.gpu(2), pytest.mark.ranks]

JOB = """
nodes: 1
ranks_per_node: 2
train:
  model: {{d_model: 1024, d_ff: 4096, layers: 12, heads: 16, context: 256, vocabulary: 4096}}
  data: synthetic
  mode: {mode}
  precision: {precision}
  batch_size: 4
  steps: 5
  device: cuda
  evaluate: false
  optimizer: {{name: adamw}}
"""
WORKSPACES = 96 * 2**20  # of cuBLAS, from the same allocator


@pytest.mark.parametrize("mode", ["bucketed", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_the_allocator_holds_what_the_formulas_say(tmp_path: Path, mode: str, precision: str) -> None:
    live = LiveRun(tmp_path, JOB.format(mode=mode, precision=precision))
    assert live.end() == 0, live.err
    _, memories = read_memories(live.run, None)
    assert len(memories) == 2
    for memory in memories:
        formula = formula_of(live.run, memory)
        assert formula is not None
        for kind in KINDS:
            assert memory.held[kind] == pytest.approx(getattr(formula, kind), rel=0.05), kind
        assert memory.rest is not None
        assert memory.rest <= 1.05 * (formula.states + formula.buffers) + WORKSPACES
        assert memory.reserved is not None
        assert memory.reserved >= memory.peak >= memory.rest
