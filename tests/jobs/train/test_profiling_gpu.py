"""What a rank on a GPU records, through `muster run`. `pytest -m gpu` on a machine that has at least two."""

import json
import pickle
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.runfolder.profiledir import ProfileDir
from muster.jobs.trace.chrome import read_document
from muster.jobs.trace.events import Trace, read_trace
from muster.jobs.trace.kinds import is_communication_kernel
from support.live import LiveRun

pytestmark = [pytest.mark.command, pytest.mark.gpu, pytest.mark.ranks]

# In fp32 and of this size the device is behind the host, so that kernels wait to run beside NCCL's.
JOB = """
nodes: 1
ranks_per_node: {ranks}
train:
  model: {{d_model: 768, d_ff: 3072, layers: 12, heads: 12, context: 512, vocabulary: 8192}}
  data: synthetic
  mode: {mode}
  batch_size: 32
  steps: 14
  device: cuda
  evaluate: false
  profile: {{first_step: 8, steps: 3}}
"""


def profile(folder: Path, *, ranks: int, mode: str, more: str = "") -> list[tuple[ProfileDir, dict[str, Any], Trace]]:
    live = LiveRun(folder, JOB.format(ranks=ranks, mode=mode) + more)
    assert live.end() == 0, live.err
    found = []
    for rank in range(ranks):
        paths = live.run.attempt(0).profile(rank)
        trace = read_trace(read_document(paths.trace)["traceEvents"])
        found.append((paths, json.loads(paths.record.read_text()), trace))
    return found


def test_one_gpu_leaves_kernels_flame_graphs_and_a_snapshot_of_its_memory(tmp_path: Path) -> None:
    ((paths, record, trace),) = profile(tmp_path, ranks=1, mode="single", more="  cuda_graph: false\n")
    assert record["overlap"] is None
    assert [step["step"] for step in record["steps"]] == [8, 9, 10]
    assert record["kernels"]
    assert 0.0 < record["matmul_share"] < 1.0
    assert {"forward", "backward", "optimizer"} <= record["device_phases"].keys()
    assert record["memory"]["cuda_peak_bytes"] > 2**20
    assert trace.has_device
    for drawn in (paths.flame, paths.cuda_flame):
        ElementTree.parse(drawn)
    assert "gemm" in paths.cuda_flame.read_text() or "nvjet" in paths.cuda_flame.read_text()
    snapshot = pickle.loads(paths.cuda_memory.read_bytes())
    assert snapshot["segments"]
    assert any(snapshot["device_traces"])


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", ["allreduce", "bucketed"])
def test_two_gpus_hide_communication_only_where_the_mode_overlaps(tmp_path: Path, mode: str) -> None:
    for _, record, trace in profile(tmp_path, ranks=2, mode=mode):
        assert any(is_communication_kernel(event.name) for event in trace.device)
        if mode == "allreduce":
            assert record["overlap"] == pytest.approx(0.0, abs=0.02)
        else:
            assert record["overlap"] > 0.0


def test_a_replayed_graph_shows_as_kernels(tmp_path: Path) -> None:
    ((_, record, trace),) = profile(tmp_path, ranks=1, mode="single", more="  cuda_graph: true\n")
    assert "replay" in record["device_phases"]
    assert len([event for event in trace.device if event.category == "kernel"]) > 100
