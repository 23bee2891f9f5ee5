"""`muster checkpoint`: what it shows, what it refuses, and that it changes nothing."""

from pathlib import Path

import pytest
import safetensors

from support.checkpoints import Saved

RUN = "vgg-20250101T000000Z-abc123"
A5, A9, B7 = "step-00000005.a000", "step-00000009.a000", "step-00000007.a001"


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A run that was rolled back from step 9 to step 5, saved step 7, and is saving step 8."""
    (tmp_path / "runs").mkdir()
    saved = Saved(tmp_path / "runs" / RUN)
    saved.run.events.touch()
    saved.save(5)
    saved.save(9)
    saved.attempt(1, A5, 5)
    saved.save(7, 1)
    saved.write(8, 1, writers=(0,))
    return saved


def state_of(saved: Saved) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in saved.run.path.rglob("*") if path.is_file()}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_list_shows_them_in_the_order_in_which_they_would_be_tried(saved, muster) -> None:
    before = state_of(saved)
    damage(saved.run.checkpoint(9, 0).manifest)
    code, out, err = muster("checkpoint", "list")
    assert (code, err) == (0, "")
    rows = [line.split()[:4] for line in out.splitlines()[1:]]
    assert rows == [
        ["step-00000008.a001", "unfinished", "8", "1"],
        [B7, "committed", "7", "1"],
        [A5, "committed", "5", "0"],
        [A9, "bad", "9", "0"],
    ]
    damage(saved.run.checkpoint(9, 0).manifest)
    assert state_of(saved) == before


def test_list_as_json_and_what_was_put_aside(saved, muster_json) -> None:
    saved.run.checkpoint(9, 0).path.rename(saved.run.checkpoint(9, 0).bad)
    rows = muster_json("checkpoint", "list")
    assert [(row["checkpoint"], row["state"]) for row in rows][-1] == (f"bad-{A9}", "put aside")
    assert {row["step"] for row in rows} == {5, 7, 8, 9}


def test_a_run_without_checkpoints_is_said(make_run, muster) -> None:
    make_run()
    assert muster("checkpoint", "list") == (0, "", f"muster: {RUN} has no checkpoints\n")
    for action in (("verify",), ("show",), ("export", "-o", "x")):
        code, _, err = muster("checkpoint", *action)
        assert code == 66
        assert "muster checkpoint list" in err


def test_verify_reads_every_byte_and_says_which_is_bad_with_66(saved, muster, muster_json) -> None:
    code, out, _ = muster("checkpoint", "verify")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [[B7, "good"], [A5, "good"]]
    damage(saved.run.checkpoint(5, 0).shard(1))
    before = state_of(saved)
    code, out, _ = muster("checkpoint", "verify")
    assert code == 66
    assert "shard-00001.safetensors: damaged: its sha256 differs from the saved one" in out
    assert [row["state"] for row in muster_json("checkpoint", "verify", "--step", "7")] == ["good"]
    assert muster("checkpoint", "verify", "--checkpoint", A9)[0] == 0
    assert state_of(saved) == before


def test_show_tells_what_it_holds(saved, muster, muster_json) -> None:
    code, out, _ = muster("checkpoint", "show")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["step", "7"] in lines
    assert ["losses", "[[7,", "1.5]]"] in lines
    assert ["model/split", "F32", "[6,", "4]", "2", "0.00"] in lines
    body = muster_json("checkpoint", "show", "--step", "5")["body"]
    assert (body["step"], sorted(body["tensors"])) == (
        5,
        ["model/flat", "model/split", "model/whole", "optimizer/whole/step"],
    )


def test_what_a_stranger_wrote_does_not_reach_the_terminal(saved, muster) -> None:
    from muster.jobs.checkpoint import sealed

    manifest = saved.run.checkpoint(7, 1).manifest
    body = sealed.unseal(manifest.read_bytes(), "manifest")
    body["meta"] |= {"mode": "\x1b[2Jgone", "saved": 1e300, "\x1b]0;x": "\x1b[31m", "world_size": "\x1b[31m"}
    manifest.write_bytes(sealed.seal(body))
    for action in ("list", "show"):
        code, out, _ = muster("checkpoint", action)
        assert code == 0
        assert "\x1b" not in out


def test_export_writes_one_plain_file_and_never_over_another(saved, muster, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    code, out, _ = muster("checkpoint", "export", "-o", str(path))
    assert (code, out) == (0, f"{path}: 3 tensors of {B7}, 0.00 MB\n")
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert sorted(found) == ["flat", "split", "whole"]
    code, _, err = muster("checkpoint", "export", "-o", str(path))
    assert code == 2
    assert "--force" in err
    assert muster("checkpoint", "export", "-o", str(path), "--force", "--step", "5")[0] == 0
    assert muster("checkpoint", "export", "-o", str(tmp_path), "--force")[0] == 2


def test_export_passes_over_a_bad_one_unless_it_was_named(saved, muster, tmp_path) -> None:
    damage(saved.run.checkpoint(7, 1).shard(0))
    path = tmp_path / "model.safetensors"
    code, out, err = muster("checkpoint", "export", "-o", str(path))
    assert code == 0
    assert A5 in out
    assert f"{B7} is bad" in err
    path.unlink()
    code, _, err = muster("checkpoint", "export", "-o", str(path), "--checkpoint", B7)
    assert code == 66
    assert "sha256" in err
    assert not path.exists()


@pytest.mark.parametrize("name", ["../../etc", "step-00000006.a000", "bad-x", "step-5.a0"])
def test_a_name_that_is_not_there_is_refused(saved, muster, name: str) -> None:
    code, _, err = muster("checkpoint", "show", "--checkpoint", name)
    assert code == 66
    assert "muster checkpoint list" in err


def test_a_wrong_action_is_a_usage_error() -> None:
    from muster.launch.cli import main

    assert main(["checkpoint"]) == 2
    assert main(["checkpoint", "shwo"]) == 2
