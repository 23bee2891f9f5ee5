"""Prove classes on ranks of the test's rank server: the store is here, so that ranks have no thread when they fork."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.job import Job
from muster.jobs.spec.plain import plain_job, spelled
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.proving.probes import ProbeRequest
from muster.jobs.train.proving.run import Prover
from muster.jobs.world.world import World

GPT = {
    "model": {"name": "gpt-nano"},
    "data": "synthetic",
    "batch_size": 8,
    "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
}
UNTIED = {**GPT, "model": {"name": "gpt-nano", "tied": False}}
Records = dict[str, dict[str, Any]]


def on_each_rank(world: World, port: int, train: dict[str, Any], asked: list[dict[str, Any]]) -> Records:
    """Prove classes one after the other; return the records, or messages of refusals, by class."""
    os.environ["OMP_NUM_THREADS"] = "1"
    job = plain_job(spelled(Job(name="proof", kind="train", settings=TrainSettings.model_validate(train))))
    found: Records = {}
    for number, each in enumerate(asked):
        given = {"kind": None, "args": {}, "steps": 2, "silent_s": 20.0, "folder": str(Path.cwd()), **each}
        given["probes"] = tuple(given.get("probes", ()))
        env = RankEnv(
            world.rank,
            world.size,
            world.rank,
            world.size,
            0,
            1,
            "127.0.0.1",
            port,
            number,
            "proof",
            "",
            agent_store=True,
        )
        try:
            record = Prover(job, env, ProbeRequest(**{**given, "folder": Path(given["folder"])}), Reporter({})).run()
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {error}"}
        found[each["text"]] = record
    return found


def prove(on_ranks: Callable[..., Any], asked: list[dict[str, Any]], *, ranks: int = 2, **train: Any) -> Records:
    """Prove classes on real ranks; return rank 0's records."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"port": store.port, "train": {**GPT, **train}, "asked": asked}
    records: Records = on_ranks(ranks, on_each_rank, group=False, **given)[0]
    return records


def failing(record: dict[str, Any]) -> list[str]:
    """Return the properties that fail."""
    assert "rows" in record, record
    return [row["name"] for row in record["rows"] if row["state"] == "fails"]
