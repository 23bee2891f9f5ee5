"""The rank of a `timing:` job, which runs the launch manager, then prints the table of measurements."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.rowlog import RowLog
from muster.jobs.basics.words import counted
from muster.jobs.hosts import ranks
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.timing.files import read_timings
from muster.jobs.timing.settings import TimingSettings
from muster.jobs.timing.table import report_lines
from muster.jobs.train.numerics.pieces import require_compiler
from muster.jobs.train.timing.launch_manager import ModelTimer
from muster.jobs.world.guard import complain, guarded, make_own_folder, measured, show_stacks
from muster.jobs.world.world import choose_device, this_peer


def run_rank(payload: Mapping[str, Any]) -> int:
    """Time all rows; return 0 unless one failed or none could be timed."""
    show_stacks()
    settings = TimingSettings.model_validate(payload["job"]["settings"])
    name = payload["job"].get("name", "timing")

    def work(reporter: Reporter) -> int:
        env = ranks.read(os.environ)
        reporter.arrived()
        device = device_of(settings)
        reporter.joined()
        path = RunDir(Path(env.run_dir)).attempt(env.attempt).bench
        return time_all(settings, device, path, name=name, reporter=reporter)

    return guarded(work)


def device_of(settings: TimingSettings) -> torch.device:
    """Choose the device, and check that it supports the settings.

    Raises:
        RefusedError: if the settings need a GPU or a compiler that this machine lacks.
    """
    device = choose_device(settings.device, 0, [this_peer()], key="timing.device")
    if settings.compile:
        try:
            require_compiler(device)
        except RefusedError as error:
            raise RefusedError(str(error).replace("train.", "timing.", 1)) from error
    return device


def time_all(settings: TimingSettings, device: torch.device, path: Path, *, name: str, reporter: Reporter) -> int:
    """Measure all rows, write them to a file, print the table, and report failures; return the exit code."""
    make_own_folder(path.parent)
    manager = ModelTimer(settings, device, RowLog(path, patient=True, say=complain), name=name)
    manager.run()
    print("\n".join(report_lines(read_timings([path]))), flush=True)
    rows = manager.rows.values()
    failed = [row for row in rows if row.state == "failed"]
    if not failed and (settings.dtypes or any(row.summary is not None for row in rows)):
        return 0
    bad = f"{counted(len(failed), 'row')} failed" if failed else "no row could be timed"
    return measured(reporter, bad, path)
