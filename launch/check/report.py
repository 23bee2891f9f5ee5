"""`muster check`, from its nodes to its report. The run folder is made for it and removed afterwards."""

import asyncio
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from muster.jobs.basics.errors import RefusedError
from muster.jobs.runfolder.rundir import make_run
from muster.launch.check.inspection import Inspection
from muster.launch.check.judges import BAD, MARKS, OF_JOB, OF_SITE, WARNING, Answer, Expected
from muster.launch.check.preflight import Row, exit_code, remarks, rows, titles, without
from muster.launch.common.fingerprint import fingerprint
from muster.launch.common.screen import table
from muster.launch.plan.plan import Context
from muster.launch.plan.program import needs
from muster.launch.submit.prepare import Prepared
from muster.launch.submit.routes import make_transport


def check(prepared: Prepared, *, as_json: bool) -> int:
    """Make the run folder, ask the nodes, print the report, and remove the folder again."""
    if prepared.route.is_queued or prepared.route.transport == "hand":
        transport = prepared.route.transport
        raise RefusedError(
            f"--on {transport}: its nodes cannot be asked from here; use --on ssh, or check inside an allocation"
        )
    context = prepared.context
    expected = expected_of(context)  # computed first, because agents read the code when they start
    code = 0

    async def work() -> None:
        inspection = Inspection(context, make_transport(prepared.submission), names_of(context))

        def show() -> None:
            nonlocal code
            found = rows(inspection.answers, replace(expected, master=inspection.master))
            code = exit_code(found, inspection.answers)
            spare = max(0, len(prepared.route.hosts.hosts) - len(found))
            print(
                as_text(found, spare) if not as_json else json.dumps(as_data(found, inspection.answers, code), indent=2)
            )
            sys.stdout.flush()

        await inspection.run(show)

    made = [each for each in (context.run.path, *context.run.path.parents) if not each.exists()]
    make_run(context.run)
    try:
        asyncio.run(work())
    finally:
        shutil.rmtree(made.pop(0), ignore_errors=True)
        for folder in made:  # remove the parents that were made here, unless somebody uses them meanwhile
            with suppress(OSError):
                folder.rmdir()
    return code


def names_of(context: Context) -> list[str]:
    """Return the names of the nodes in the report: their hosts, numbered if pretend nodes share one."""
    hosts = [node.host for node in context.placement.nodes]
    return hosts if len(set(hosts)) == len(hosts) else [f"{host}-{node}" for node, host in enumerate(hosts)]


def expected_of(context: Context) -> Expected:
    """Return the expectations of the job and this machine. The master's address is filled in later."""
    return Expected(
        code=fingerprint(),
        ranks=tuple(node.ranks for node in context.placement.nodes),
        torch=context.entry is not None and not (context.warm_python and not needs(context)[0]),
        python=OF_JOB if context.warm_python else OF_SITE,
        device=str(getattr(context.job.settings, "device", "")),
        master="",
        one_host=not context.remote or len(context.placement.nodes) == 1,
        remote=context.remote,
        run=str(context.run.path.parent),
    )


def as_text(found: Sequence[Row], spare: int) -> str:
    """Render the report: the table, warnings, problems, and how to continue; `spare`: the number of unused hosts."""
    columns = titles(found)
    cells = (
        [row.node, row.host, *(row.cells[title].text + MARKS[row.cells[title].state] for title in columns)]
        for row in found
    )
    lines = [table(["node", "host", *columns], cells), ""]
    lines += [f"warning: {text}" for text in remarks(found, WARNING)]
    lines += [f"bad: {text}" for text in remarks(found, BAD)]
    bad = sum(row.state == BAD for row in found)
    lines.append(f"{len(found) - bad} of {len(found)} nodes can take part")
    if left_out := without(found):
        fewer = "" if spare >= bad else f" --nodes {len(found) + spare - bad}"
        lines.append(f"to continue without the others: --exclude {shlex.quote(left_out)}{fewer}")
    return "\n".join(lines)


def as_data(found: Sequence[Row], answers: Sequence[Answer], code: int) -> dict[str, Any]:
    """Return the report as plain JSON values."""
    nodes = [
        {"node": row.node, "host": row.host, "state": row.state, "cells": asdict(row)["cells"], "facts": answer.facts}
        for row, answer in zip(found, answers, strict=True)
    ]
    return {"code": code, "exclude": without(found), "nodes": nodes}
