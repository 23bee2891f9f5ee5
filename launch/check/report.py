"""Run `muster check`: ask the nodes and print the report. Its run folder is temporary."""

import asyncio
import json
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from muster.jobs.basics import exits
from muster.jobs.basics.errors import RefusedError
from muster.jobs.runfolder.rundir import make_run
from muster.launch.check.inspection import Inspection
from muster.launch.check.judges import BAD, MARKS, OF_JOB, OF_SITE, WARNING, Answer, Expected
from muster.launch.check.preflight import NodeRow, exit_code, remarks, rows, titles, without
from muster.launch.check.smoke import is_wanted, smoke_test
from muster.launch.common.fingerprint import fingerprint
from muster.launch.common.screen import table
from muster.launch.plan.plan import Context
from muster.launch.plan.program import needs
from muster.launch.submit.prepare import prepare
from muster.launch.submit.request import Request
from muster.launch.submit.routes import make_transport


def check(request: Request, *, as_json: bool, smoke: bool | None = None) -> int:
    """Make the run folder, ask the nodes, test two of them, print the report, and remove the folder again.

    `smoke`: whether to run the smoke test; None: only if all nodes have GPUs.
    """
    prepared = prepare(request)
    if prepared.route.is_queued or prepared.route.transport == "hand":
        transport = prepared.route.transport
        raise RefusedError(
            f"--on {transport}: its nodes cannot be checked from here; use --on ssh, or check inside an allocation"
        )
    context = prepared.context
    if smoke:
        is_wanted(smoke, context, ())
    expected = expected_of(context)  # computed first, because agents read the code when they start
    code = 0
    data: dict[str, Any] = {}
    answers: list[Answer] = []

    async def work() -> None:
        inspection = Inspection(context, make_transport(prepared.submission), names_of(context))

        def show() -> None:
            nonlocal code
            answers.extend(inspection.answers)
            found = rows(inspection.answers, replace(expected, master=inspection.master))
            code = exit_code(found, inspection.answers)
            spare = max(0, len(prepared.route.hosts.hosts) - len(found))
            data.update(as_data(found, inspection.answers, code))
            if not as_json:
                print(as_text(found, spare), flush=True)

        await inspection.run(show)

    made = [each for each in (context.run.path, *context.run.path.parents) if not each.exists()]
    make_run(context.run)
    try:
        asyncio.run(work())
        if code == 0 and is_wanted(smoke, context, answers):
            tested = smoke_test(request, context, gpus=all(answer.facts.get("gpus") for answer in answers))
            code = exits.REFUSED if tested.why else code
            data |= {"code": code, "smoke": asdict(tested)}
            if not as_json:
                print(tested.sentence())
        if as_json:
            print(json.dumps(data, indent=2))
    finally:
        shutil.rmtree(made.pop(0), ignore_errors=True)
        for folder in made:  # remove the parent folders that this command created, unless another process now uses them
            with suppress(OSError):
                folder.rmdir()
    return code


def names_of(context: Context) -> list[str]:
    """Return the nodes' names for the report: their hosts, numbered if pretend nodes share a host."""
    hosts = [node.host for node in context.placement.nodes]
    return hosts if len(set(hosts)) == len(hosts) else [f"{host}-{node}" for node, host in enumerate(hosts)]


def expected_of(context: Context) -> Expected:
    """Return the values expected of every node. The master's address is filled in later."""
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


def as_text(found: Sequence[NodeRow], spare: int) -> str:
    """Render the report: table, warnings, problems and how to continue. `spare`: the number of unused hosts."""
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


def as_data(found: Sequence[NodeRow], answers: Sequence[Answer], code: int) -> dict[str, Any]:
    """Return the report as plain JSON values."""
    nodes = [
        {"node": row.node, "host": row.host, "state": row.state, "cells": asdict(row)["cells"], "facts": answer.facts}
        for row, answer in zip(found, answers, strict=True)
    ]
    return {"code": code, "exclude": without(found), "nodes": nodes}
