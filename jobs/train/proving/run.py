"""A rank of `muster verify --with`: fork a process for every probe, watch it, collect the results of all ranks.

    rank            forks  probe  probe  probe   each with a process group of its own; the rank joins none
    PROBE/trouble   store: a rank's probe has failed, or is stuck and no other makes progress, so the others are ended
    PROBE/silent/RANK   store: that rank's probe makes no progress, or has ended
    PROBE/RANK      store: the reports of that rank's probe; once all are there, the next probe begins

If a class raises, hangs or dies, only the current probe fails.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from muster.jobs.basics.errors import RefusedError, StartTimeoutError
from muster.jobs.basics.files import write_json
from muster.jobs.basics.reading import parse_json
from muster.jobs.hosts import ranks
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.machine import linux
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.plain import plain_job
from muster.jobs.train.main import run_of, settings_of
from muster.jobs.train.proving.bench import merged
from muster.jobs.train.proving.probes import PROBES, ProbeRequest, probe_in_child
from muster.jobs.user.code import UserCodeError
from muster.jobs.user.properties import TITLES
from muster.jobs.world.forked import Forked
from muster.jobs.world.guard import FAILED, guarded, show_stacks
from muster.jobs.world.meeting import connect, meet
from muster.jobs.world.world import choose_device

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job

POLL_S: Final = 0.1
VICTIM_S: Final = 1.0  # time for a rank to report its own failure after another rank's
ENDING_S: Final = 3600.0  # time for rank 0 to train the reference after the other ranks have ended

TROUBLE: Final = frozenset({"failed", "refused"})

Report = dict[str, Any]


def prove_rank(payload: Mapping[str, Any]) -> int:
    """Run all probes as one rank. Rank 0 writes the table and returns 1 if a property fails that is not waived.

    `payload`: {"job": the serialized job, "steps": K, "with": FILE.py:NAME, "as": kind or null, "args": {...}, "waive":
    [...], "silent_s": seconds}.
    """
    show_stacks()

    def work(reporter: Reporter) -> int:
        env, job = ranks.read(os.environ), plain_job(payload["job"])
        asked = ProbeRequest(
            payload["with"], payload["as"], payload["args"], payload["steps"], payload["silent_s"], Path.cwd().resolve()
        )
        record = Prover(job, env, asked, reporter).run()
        if env.rank != 0:
            return 0
        record["waived"] = sorted(payload["waive"])
        failed = [row["name"] for row in record["rows"] if row["state"] == "fails"]
        record["pass"] = not set(failed) - set(payload["waive"])
        write_json(run_of(env).verify, record)
        return 0 if record["pass"] else FAILED

    return guarded(work)


class Prover:
    """One rank of `muster verify --with`, which runs all probes."""

    def __init__(self, job: "Job", env: RankEnv, asked: ProbeRequest, reporter: Reporter) -> None:
        self.job, self.env, self.asked, self.timeout_s = job, env, asked, job.start_timeout_s
        reporter.arrived()
        self.store: Store = connect(env, self.timeout_s)
        peers = meet(self.store, env, self.timeout_s)
        self.device = choose_device(settings_of(job).device, env.rank, peers)
        reporter.joined()
        self.kind = ""

    def run(self) -> dict[str, Any]:
        """Run all probes; return the record for `verify.json`."""
        rows: list[dict[str, str]] = []
        tracebacks: list[dict[str, Any]] = []
        names, number = ["runs"], 0
        while number < len(names):
            reports = self.probe(names[number], number)
            found = rows_of(names[number], reports)
            self.kind = self.kind or next((each["kind"] for each in reports if "kind" in each), "")
            if not self.kind:
                raise UserCodeError(f"--with: {self.asked.text} cannot be imported: {found[-1]['evidence']}")
            wanted = self.asked.probes or tuple(PROBES[self.kind])
            names = [each for each in PROBES[self.kind] if each == "runs" or each in wanted]
            rows += found
            failures = [{"rank": rank, **each["failed"]} for rank, each in enumerate(reports) if "failed" in each]
            tracebacks += [each for each in failures if each not in tracebacks]
            number += 1
            if rows and rows[-1]["name"] == "no-hang":  # the next probes would probably also hang
                break
        hung = [row for row in rows if row["name"] == "no-hang"]
        rows = [row for row in rows if row["name"] != "no-hang"]
        ended = {"name": "no-hang", "state": "ok", "evidence": f"{len(names)} probes ended on every rank"}
        rows.insert(0, hung[0] if hung else ended)
        return {
            "job": self.job.name,
            "with": self.asked.text,
            "kind": self.kind,
            "world_size": self.env.world_size,
            "device": self.device.type,
            "steps": self.asked.steps,
            "rows": [{**row, "title": TITLES.get(row["name"], row["name"])} for row in rows],
            "tracebacks": tracebacks,
        }

    def probe(self, name: str, number: int) -> list[Report]:
        """Run one probe; return the reports of all ranks.

        Raises:
            RefusedError: if the class cannot be imported or built on some rank.
        """
        place = PrefixStore(f"proving/{number}", self.store)
        mine = self.follow(name, number, place)
        place.set(str(self.env.rank), json.dumps(mine))
        try:
            place.wait([str(rank) for rank in range(self.env.world_size)], timedelta(seconds=ENDING_S))
        except dist.DistStoreError as error:
            raise StartTimeoutError(f"a rank did not end probe {name} within {ENDING_S:g} s") from error
        reports = [parse_json(place.get(str(rank))) for rank in range(self.env.world_size)]
        for rank, each in enumerate(reports):
            if refused := each.get("refused"):
                if number == 0:
                    raise RefusedError(f"rank {rank}: {refused['message']}")
                each["failed"] = {"step": "construction", "error": refused["message"], **refused}
        return reports

    def follow(self, name: str, number: int, place: Store) -> Report:
        """Fork the process of a probe and collect its report; kill it if it outlives a failure on some rank."""
        work = probe_in_child(name, number, self.asked, settings_of(self.job), self.env, self.device, self.timeout_s)
        report: Report = {}
        trouble_since: list[float] = []

        everybody = [f"silent/{rank}" for rank in range(self.env.world_size)]

        def hear(message: Report) -> None:
            report.update(message)
            if message.keys() & TROUBLE:
                place.set("trouble", "1")
            if message.get("silent") is False:
                place.delete_key(everybody[self.env.rank])
            elif message.get("silent"):
                place.set(everybody[self.env.rank], "1")

        def is_over() -> bool:
            # The rank that a stuck one waits for may only be slow, so all must be silent.
            if report.get("stuck") and place.check(everybody):
                place.set("trouble", "1")
            if not trouble_since and place.check(["trouble"]):
                trouble_since.append(time.monotonic())
            return bool(trouble_since) and time.monotonic() - trouble_since[0] > VICTIM_S

        child, killed = Forked(work), False
        while (messages := child.told(POLL_S)) is not None:
            for message in messages:
                hear(message)
            if is_over():
                linux.kill_quietly(child.pid, signal.SIGKILL)
                killed = True
        place.set(everybody[self.env.rank], "1")
        ended = child.buried(silent=False)
        if ended.how == "died" and not killed and not report.keys() & TROUBLE:
            place.set("trouble", "1")
            report["failed"] = {"step": "unknown", "error": f"its process {ended.message}", "traceback": ""}
        return report


def rows_of(probe: str, reports: list[Report]) -> list[dict[str, str]]:
    """Return the rows of one probe: the checked properties, and a row for the probe's own failure, if any."""
    rows = merged([each.get("rows", []) for each in reports])
    failed = [(rank, each["failed"]) for rank, each in enumerate(reports) if "failed" in each]
    stuck = [(rank, each["stuck"]) for rank, each in enumerate(reports) if each.get("stuck")]
    if failed:
        rank, what = failed[0]
        rows.append({"name": probe, "state": "fails", "evidence": f"rank {rank}, {what['step']}: {what['error']}"})
    elif stuck:
        said = "; ".join(
            f"rank {rank}, {what['step']}: {'waits in ' + what['doing'] if what['doing'] else 'is stuck'} at "
            f"{what['where'] or 'a line outside the working folder'}"
            for rank, what in stuck
        )
        others = sorted({*range(len(reports))} - {rank for rank, _ in stuck})
        said += f"; not stuck: {', '.join(f'rank {rank}' for rank in others)}" if others else ""
        said += f"; no rank made progress in {stuck[0][1]['limit_s']:g} s (hang_s), without waits for a core"
        rows.append({"name": "no-hang", "state": "fails", "evidence": said})
    elif any(each.get("victim") for each in reports):
        rows.append({"name": probe, "state": "fails", "evidence": "a rank lost its connection to another rank"})
    return rows
