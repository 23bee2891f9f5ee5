"""One plain file out of many shards; and how often to save."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import BadCheckpointError, NoCheckpointError, StorageError
from muster.jobs.checkpoint import commit
from muster.jobs.checkpoint import export as export_module
from muster.jobs.checkpoint.export import export
from muster.jobs.checkpoint.interval import mean_time_between_failures, young_daly
from muster.jobs.checkpoint.manifest import read_manifest
from muster.jobs.checkpoint.pieces import whole
from muster.jobs.checkpoint.shard import write_shard
from support.checkpoints import content


def test_plain_pytorch_loads_the_export(saved, tmp_path, monkeypatch) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(export_module, "CHUNK_BYTES", 40)  # tensors are put together from several chunks
    folder = saved.save(5)
    path = tmp_path / "model.safetensors"
    assert export(folder, read_manifest(folder), path) == 3
    tensors = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "whole": (5,),
        "split": (6, 4),
        "flat": (6, 4),
    }
    for name, tensor in tensors.items():
        assert tensor.numpy().tobytes() == content(5, f"model/{name}", tensor.nbytes)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_an_export_that_fails_leaves_the_file_that_was_there(saved, tmp_path) -> None:
    folder = saved.save(5)
    manifest = read_manifest(folder)
    path = tmp_path / "model.safetensors"
    path.write_text("before")
    folder.shard(1).unlink()
    with pytest.raises(BadCheckpointError, match="missing"):
        export(folder, manifest, path)
    assert path.read_text() == "before"
    assert {each.name for each in tmp_path.iterdir()} == {"run", path.name}


def test_an_export_writes_to_the_given_name_and_not_through_a_link(saved, tmp_path) -> None:
    folder = saved.save(5)
    precious = tmp_path / "precious"
    precious.write_text("x")
    path = tmp_path / "model.safetensors"
    path.symlink_to(precious)
    export(folder, read_manifest(folder), path)
    assert precious.read_text() == "x"
    assert not path.is_symlink()


def test_without_parameters_there_is_nothing_to_export(saved, tmp_path) -> None:
    folder = commit.begin(saved.run, 1, 0)
    write_shard(folder, 0, 1, [(whole("optimizer/w/step", "I64", ()), bytes(8))], meta={})
    with pytest.raises(NoCheckpointError, match="no parameters"):
        export(folder, commit.commit(saved.run, folder, 1), tmp_path / "x")


def test_a_full_disk_leaves_no_export(saved, tmp_path, monkeypatch) -> None:
    folder = saved.save(5)

    def full(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("muster.jobs.checkpoint.disk._reserve", full)
    with pytest.raises(StorageError, match="No space left"):
        export(folder, read_manifest(folder), tmp_path / "x")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("stall_s", "mtbf_s", "more", "wanted_s"),
    [
        (0.1, 3 * 3600.0, {}, math.sqrt(2 * 0.1 * 3 * 3600)),  # 46 s
        (0.0, 3 * 3600.0, {}, 30.0),
        (0.05, 60.0, {}, 30.0),
        (10.0, 1e9, {}, 1800.0),
        (60.0, 3600.0, {}, 6000.0),  # 1 % overhead wins over everything
        (0.5, 0.0, {}, 50.0),
        (0.1, 60.0, {"step_s": 100.0}, 100.0),  # no shorter than a step or a save
        (0.1, 60.0, {"save_s": 45.0}, 45.0),
    ],
)
def test_the_interval_is_youngs_and_dalys_within_limits(
    stall_s: float, mtbf_s: float, more: dict[str, float], wanted_s: float
) -> None:
    assert young_daly(stall_s, mtbf_s, **more) == pytest.approx(wanted_s)


@given(st.floats(0, 1e4), st.floats(0, 1e9), st.floats(0, 1e4), st.floats(0, 1e4))
def test_stalls_never_cost_over_one_percent(stall_s: float, mtbf_s: float, step_s: float, save_s: float) -> None:
    interval_s = young_daly(stall_s, mtbf_s, step_s=step_s, save_s=save_s)
    assert interval_s >= max(30.0, step_s, save_s)
    assert stall_s / interval_s <= 0.01 * (1 + 1e-9)


def test_failures_shorten_what_is_expected_and_none_do_not_make_it_infinite() -> None:
    assert mean_time_between_failures(0.0, 0) == 3 * 3600
    assert mean_time_between_failures(3600.0, 3) == 3600.0
    assert mean_time_between_failures(60.0, 0) > mean_time_between_failures(60.0, 1)
