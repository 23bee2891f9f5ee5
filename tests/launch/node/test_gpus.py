"""How busy GPUs are: asked of a library that answers as NVML does, and of the real one where there is a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muster.launch.node.gpus import Gpus
from support.terminals import environment

NVML = """
struct utilization { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(0x7fff00000000ULL + index);
    return index > 1 ? 2 : 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)0x7fff00000001ULL;
    return uuid[4] != 'a';
}
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *found) {
    found->gpu = 40 + ((unsigned long long)device & 1);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *found) { found->used = 1ULL << 36; return 0; }
"""
ASK = "from muster.launch.node.gpus import Gpus; look = Gpus().look; print(*map(look, ('0', '1', 'GPU-abc', 'x', '9')))"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_gpus_are_found_by_number_and_by_uuid(tmp_path: Path) -> None:
    source = tmp_path / "nvml.c"
    source.write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", source], check=True, timeout=60)
    told = {**environment(), "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASK], env=told, check=True, capture_output=True, text=True, timeout=60)
    used = 1 << 36
    assert done.stdout == f"(40, {used}) (41, {used}) (41, {used}) None None\n"


def test_without_the_library_nothing_is_known() -> None:
    if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110
        assert Gpus().look("0") is None


@pytest.mark.gpu
def test_the_memory_that_the_driver_tells_is_what_cuda_tells() -> None:
    import torch

    kept = torch.ones(1 << 28, device="cuda")
    free, total = torch.cuda.mem_get_info()
    seen = Gpus().look(os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    assert seen is not None
    assert 0 <= seen[0] <= 100
    assert abs(seen[1] - (total - free)) < 0.02 * total + kept.nbytes
