"""Slurm's commands as one small program, for tests of what we do with their words; real ones are tried in the box.

The folder holds `world.json`: the jobs by number, and what the commands do. Every call is a line of `calls.jsonl`.
"""

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "sacct")


class FakeSlurm:
    """A cluster that does what the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {Path(__file__)} {name} {folder} "$@"\n')
            program.chmod(0o755)
        with self.world() as world:
            world.update({"next": 12, "jobs": {}, "down": ""})

    @property
    def environment(self) -> dict[str, str]:
        """What finds these commands, and only these."""
        return {"PATH": f"{self.folder}:/usr/bin:/bin"}

    @contextmanager
    def world(self) -> Iterator[dict[str, Any]]:
        """Read the world, and write it back changed."""
        with _locked(self.folder) as world:
            yield world

    def job(self, job_id: str = "12", **fields: Any) -> None:
        """Make a job, or change it: state, reason, name, nodes, end, host, code (as in 0:9), restarts."""
        with self.world() as world:
            world["jobs"].setdefault(job_id, {}).update(fields)

    def says(self, **fields: str) -> None:
        """Change what the commands say: down, refuses, loses_answer, note, suffix, requeue_says, scancel_says."""
        with self.world() as world:
            world.update(fields)

    def calls(self, program: str = "") -> list[list[str]]:
        """List the calls so far, argv with the program's name."""
        return [row["argv"] for row in self._rows() if not program or row["argv"][0] == program]

    def environments(self, program: str) -> list[dict[str, str]]:
        """List what the calls of a program were started with."""
        return [row["environment"] for row in self._rows() if row["argv"][0] == program]

    def _rows(self) -> list[dict[str, Any]]:
        """Read the calls, none of which is half written meanwhile."""
        path = self.folder / "calls.jsonl"
        with self.world():
            return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def _locked(folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "world.json"
        world = json.loads(path.read_text()) if path.exists() else {}
        yield world
        path.write_text(json.dumps(world))


def main(program: str, folder: Path, argv: list[str]) -> int:
    """Be one of the commands."""
    with _locked(folder) as world:
        with (folder / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps({"argv": [program, *argv], "environment": dict(os.environ)}) + "\n")
        if world["down"]:
            print(world["down"], file=sys.stderr)
            return 1
        if program == "sacct" and not world.get("accounting"):
            print("Slurm accounting storage is disabled", file=sys.stderr)
            return 1
        return {
            "sbatch": sbatch,
            "squeue": squeue,
            "scontrol": scontrol,
            "scancel": scancel,
            "sinfo": sinfo,
            "sacct": sacct,
        }[program](world, argv)


def option(argv: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in argv if word.startswith(f"--{name}=")), "")


def sbatch(world: dict[str, Any], argv: list[str]) -> int:
    if said := world.get("refuses"):
        print(said, file=sys.stderr)
        return 1
    job_id = str(world["next"])
    world["next"] += 1
    lines = Path(argv[-1]).read_text().splitlines()
    name = next(line.partition("=")[2] for line in lines if line.startswith("#SBATCH --job-name="))
    array = next((line.partition("=0-")[2] for line in lines if line.startswith("#SBATCH --array=")), "")
    elements = range(int(array.partition("%")[0]) + 1) if array else ()
    for key in [f"{job_id}_{each}" for each in elements] or [job_id]:
        world["jobs"][key] = {"state": "PENDING", "reason": "None", "name": name, **world.get("new", {})}
    if said := world.get("loses_answer"):
        print(said, file=sys.stderr)
        return 1
    print(world.get("note", ""), file=sys.stderr)
    print(job_id + world.get("suffix", "") if "--parsable" in argv else f"Submitted batch job {job_id}")
    return 0


def squeue(world: dict[str, Any], argv: list[str]) -> int:
    wanted = option(argv, "jobs").split(",")
    name = option(argv, "name")
    shown = {key: job for key, job in world["jobs"].items() if (job["name"] == name if name else key in wanted)}
    shown = {key: job for key, job in shown.items() if not job.get("forgotten")}
    if not shown and len(wanted) == 1 and not name:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    for key, job in shown.items():
        if option(argv, "format") == "%T":
            print(job["state"])
            continue
        fields = (key, job["state"], job["name"], job.get("nodes", ""), job.get("end", "N/A"), job.get("host", "n/a"))
        print(key if name else "|".join((*fields, job.get("reason", "None"))))
    return 0


def scontrol(world: dict[str, Any], argv: list[str]) -> int:
    job = world["jobs"].get(argv[-1])
    if "requeue" in argv:
        if said := world.get("requeue_says"):
            print(said, file=sys.stderr)
            return 1
        job.update({"state": "PENDING", "reason": "BeginTime", "restarts": job.get("restarts", 0) + 1})
        return 0
    if job is None or job.get("forgotten"):
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    print(
        f"JobId={argv[-1]} JobName={job['name']} UserId=root(0) JobState={job['state']} "
        f"Reason={job.get('reason', 'None').replace(' ', '_')} Requeue=1 Restarts={job.get('restarts', 0)} "
        f"ExitCode={job.get('code', '0:0')} EndTime={job.get('end', 'Unknown')} NodeList={job.get('nodes', '(null)')} "
        f"BatchHost={job.get('host', '(null)')} Command=/x/sbatch.sh Comment=JobState=RUNNING "
    )
    return 0


def scancel(world: dict[str, Any], argv: list[str]) -> int:
    job = world["jobs"].get(argv[-1])
    if said := world.get("scancel_says"):
        print(said, file=sys.stderr)
        return 1
    if job is not None and job["state"] in ("PENDING", "RUNNING"):
        job.update({"state": "CANCELLED", "code": "0:15"})
    return 0


def sinfo(world: dict[str, Any], argv: list[str]) -> int:
    print("main (4 nodes of 4 cores and 2000 MB, limit infinite)")
    return 0


def sacct(world: dict[str, Any], argv: list[str]) -> int:
    job = world["jobs"].get(option(argv, "jobs"))
    if job is not None:
        end, nodes = job.get("end", "Unknown"), job.get("nodes", "None assigned")
        fields = (option(argv, "jobs"), job["accounted"], job["name"], nodes, end, job.get("code", "0:0"), "None")
        print("|".join(fields))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
