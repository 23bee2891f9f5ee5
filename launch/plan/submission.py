"""The submission file in a run's folder, which passes all decisions made at submission to the supervisor.

muster run      writes it and supervises at once
muster submit   writes it and returns; a detached supervisor, the batch script or submitit reads it
"""

import json
import os
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from muster.jobs.basics import reading
from muster.jobs.basics.errors import MusterError, RefusedError, RunFolderError
from muster.jobs.basics.files import write_secret
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import NodePlacement, Placement
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.gone import first_gone
from muster.jobs.spec.job import Job
from muster.jobs.spec.site import Site
from muster.launch.common.event_rows import typed_lines
from muster.launch.common.kinds import BY_KEY
from muster.launch.plan.interpreter import Interpreter
from muster.launch.plan.plan import Context
from muster.slurm.allocation import inside_allocation

VERSION: Final = 1


@dataclass(frozen=True)
class Route:
    """The transport of a run, its hosts, and further settings of the transport."""

    transport: str
    hosts: HostSet
    fanout: int = 0  # 0: the transport's default
    port: int = 0  # the port at which agents connect to the supervisor; 0: any free port
    secret: str = ""  # the run's secret, if agents have their keys already
    iface: str | None = None

    @property
    def is_here(self) -> bool:
        """True when all nodes are pretend nodes on this machine."""
        return self.transport == "local"

    @property
    def is_queued(self) -> bool:
        """True when the run goes into Slurm's queue, through submitit or from outside an allocation."""
        return self.transport == "submitit" or (self.transport == "slurm" and not inside_allocation(os.environ))


@dataclass(frozen=True)
class Submission:
    """Everything that a supervisor needs to start a run."""

    route: Route
    context: Context

    def write(self) -> None:
        """Write the submission into the run folder, readable by the user only: environments may contain secrets.

        Raises:
            RunFolderError, StorageError: if the folder cannot be written.
        """
        context = self.context
        record = {
            "version": VERSION,
            "route": asdict(self.route),
            "job": context.job.model_dump(mode="json", exclude_unset=True),
            "site": context.site.model_dump(mode="json", exclude_unset=True),
            "placement": context.placement.to_json(),
            "spares": [asdict(node) for node in context.spares],
            "workdir": context.workdir,
            "python": context.python,
            "interpreter": asdict(context.interpreter) if context.interpreter else None,
            "code": context.code,
            "options": dict(context.options),
        }
        write_secret(context.run.submission, json.dumps(record, indent=2) + "\n")

    @classmethod
    def read(cls, run: RunDir) -> "Submission":
        """Read a run's submission, with the attempt number set to the next one.

        Raises:
            RunFolderError: if the run has no usable submission.
            RefusedError: if its job has a key or a value that only earlier versions had.
        """
        try:
            record = reading.read_json(run.submission)
            if record["version"] != VERSION:
                raise RunFolderError(f"{run.submission}: version {record['version']}; this Muster reads {VERSION}")
            route = TypeAdapter(Route).validate_python(record["route"])
            # attempts may have a row but no folder
            judged = (row["attempt"] for row in typed_lines(run.attempts) if "attempt" in row)
            kind = BY_KEY[record["job"]["kind"]]
            settings = kind.settings.model_validate(record["job"]["settings"])
            context = Context(
                job=Job.model_validate({**record["job"], "settings": settings}),
                site=Site.model_validate(record["site"]),
                placement=Placement.from_json(record["placement"]),
                run=run,
                workdir=record["workdir"],
                python=record["python"],
                entry=kind.entry,
                options=record["options"],
                attempt=1 + max((*run.attempt_numbers(), *judged), default=-1),
                code=record["code"],
                remote=route.transport != "local",
                iface=route.iface,
                spares=tuple(NodePlacement(**node) for node in record.get("spares", ())),
                interpreter=TypeAdapter(Interpreter | None).validate_python(record.get("interpreter")),
            )
            return cls(route, context)
        except MusterError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ValidationError) and (why := first_gone(error.errors())):
                raise RefusedError(f"{run.run_id}: this version cannot continue it: {why}") from error
            raise RunFolderError(f"{run.submission}: cannot be read: {error}; submit the job again") from error
