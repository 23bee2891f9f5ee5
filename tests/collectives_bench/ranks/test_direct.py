"""Benchmarks without an agent: one process per rank, started by torchrun; and what a start refuses."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from muster.collectives_bench.ranks import direct
from support.bench import blocks, by_hand
from support.programs import Programs

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]
QUICK = ["--operation", "all_reduce,barrier", "--sizes", "4K", "--launches", "2", "--block-s", "0.02"]


def test_torchrun_starts_it_its_own_store_is_used_and_rank_0_prints_and_writes(
    programs: Programs, tmp_path: Path
) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "muster.collectives_bench"]
    ended = by_hand(programs, *torchrun, *QUICK, "--out", "mine.jsonl", folder=tmp_path).wait()
    assert ended.returncode == 0, ended.stderr
    assert "verdict: OK" in ended.stdout
    found = blocks(tmp_path / "mine.jsonl")
    assert {each["world"]["ranks"] for each in found} == {2}
    assert [(each["launch"], each["state"]) for each in found] == [(0, "ok")] * 2 + [(1, "ok")] * 2


REFUSED = {
    "--backend nccl": (78, "bench.backend: nccl: this torch ("),
    "--device cuda": (78, "bench.device: cuda: this torch ("),
    "--operation send_recv": (78, "bench.operation: send_recv needs 2 ranks, but this job has 1"),
    "--pairs true": (78, "bench.pairs: needs 2 nodes or more"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_torch_or_the_world_lacks_is_refused_before_anything_is_started(words, capsys, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for CPUs, wherever this runs
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    code, message = REFUSED[words]
    operation = [] if "--operation" in words else ["--operation", "all_reduce"]
    assert direct.main([*operation, *words.split()]) == code
    assert capsys.readouterr().err.startswith(f"muster: {message}")


WRONG = {
    "--sizes 12Q": "argument --sizes: not a size: '12Q'",
    "--operation all_reduce,all_reduze": "argument --operation: unknown operation 'all_reduze'",
    "--launches 0": "argument --launches: Input should be greater than or equal to 1",
    "--check maybe": "argument --check: must be true or false, got 'maybe'",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_option_is_named(words, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        direct.main(words.split())
    assert end.value.code == 2
    assert f"error: {WRONG[words]}" in capsys.readouterr().err


def test_records_are_never_added_to_a_file_that_is_there(tmp_path: Path, capsys, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    kept = tmp_path / "bench.jsonl"
    kept.write_text("mine\n")
    assert direct.main(["--operation", "all_reduce", "--out", str(kept)]) == 78
    assert "exists already; remove it, or name another file" in capsys.readouterr().err
    assert kept.read_text() == "mine\n"
