"""Free memory as the kernel and control groups of both versions tell it."""

from pathlib import Path

import pytest

from muster.jobs.machine import free

GB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc and /sys of our own: 8 GB available, no control groups."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {8 * 2**20} kB\n")
    (tmp_path / "own").write_text("")
    (tmp_path / "groups").mkdir()
    monkeypatch.setattr(free, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(free, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(free, "GROUPS", tmp_path / "groups")
    return tmp_path


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_control_groups_it_is_what_the_kernel_says(system):
    assert free.free_bytes() == 8 * GB


def test_a_group_of_version_2_that_is_nearer_its_limit_decides(system):
    (system / "own").write_text("0::/a/b\n")
    group(system / "groups", cgroup__controllers="memory")
    group(system / "groups/a", memory__max=4 * GB, memory__current=GB, memory__stat=f"anon 1\ninactive_file {GB // 2}")
    group(system / "groups/a/b", memory__max="max", memory__current=GB)
    assert free.free_bytes() == 3 * GB + GB // 2


def test_a_group_of_version_1_decides_too(system):
    (system / "own").write_text("4:cpu,memory:/job\n3:cpuset:/\n0::/\n")
    stat = "inactive_file 7\ntotal_inactive_file 4096"
    names = {"memory__limit_in_bytes": 2 * GB, "memory__usage_in_bytes": GB, "memory__stat": stat}
    group(system / "groups/memory/job", **names)
    assert free.free_bytes() == GB + 4096


def test_a_container_that_shows_its_group_as_the_root_is_understood(system):
    (system / "own").write_text("0::/../../docker/abc\n")
    group(system / "groups", cgroup__controllers="memory", memory__max=2 * GB, memory__current=0)
    assert free.free_bytes() == 2 * GB


def test_a_group_beyond_its_limit_leaves_nothing(system):
    (system / "own").write_text("0::/a\n")
    group(system / "groups", cgroup__controllers="memory")
    group(system / "groups/a", memory__max=GB, memory__current=2 * GB)
    assert free.free_bytes() == 0


def test_this_machine_has_some():
    assert free.free_bytes() > 0
