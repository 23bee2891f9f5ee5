"""`muster report` of a long, wide run: how long it takes to write, how large the page is, how long it takes to open.

    written   wall time of the whole command on a run folder of --ranks and --steps, median of the repeats
    page      size of the HTML file
    opened    from the navigation to the end of `load` in headless Chromium, median of the repeats

The run folder is made up (tests/support/report_runs.py). Wall times need a quiet machine; the CPU time is beside them.

    .venv/bin/python benchmarks/report_size.py [--quick] [--ranks 64] [--steps 10000] [--repeats 5]
"""

import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Options, finish, table, verdict

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.report_runs import write_run

REACH = {"written": (5.0, "s"), "page": (3.0, "MB"), "opened": (1.0, "s")}


def written(run: Path, page: Path) -> tuple[float, float]:
    """Write the report; return its wall time and its CPU time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [sys.executable, "-m", "muster", "report", str(run), "--output", str(page)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu_s


def opened(page: Path, repeats: int) -> list[float]:
    """Open the page so many times; return the seconds until it was loaded, or nothing without Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("opened: no Chromium here, install the package chromium")
        return []
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"]  # which root cannot have, nor many containers
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=arguments)
        found = []
        for _ in range(repeats):
            tab = browser.new_page()
            tab.goto(page.as_uri())
            found.append(float(tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")) / 1e3)
            tab.close()
        browser.close()
    return found


def main() -> int:
    """Measure and report."""
    parser = Options(__doc__, repeats=5, quick={"repeats": 1, "ranks": 8, "steps": 1000})
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, page = write_run(Path(folder), "long", ranks=args.ranks, steps=args.steps), Path(folder, "page.html")
        times = [written(run.path, page) for _ in range(args.repeats)]
        values = {"written": [wall_s for wall_s, _ in times], "page": [page.stat().st_size / 1e6]}
        values["opened"] = opened(page, args.repeats)
    rows: list[dict[str, Any]] = []
    for name, found in values.items():
        reach, unit = REACH[name]
        if found:
            value = statistics.median(found)
            rows.append({"name": name, "value": value, "unit": unit, "values": found, "reach": reach})
            rows[-1]["reached"] = value <= reach
    head = ("what", "median", "unit", "reach")
    table(head, [(r["name"], f"{r['value']:.2f}", r["unit"], verdict(r["reached"], r["reach"])) for r in rows])
    cpu_s = statistics.median(cpu_s for _, cpu_s in times)
    print(f"CPU time of writing: {cpu_s:.2f} s; {args.ranks} ranks, {args.steps} steps")
    return finish(args, "report_size", rows, cpu_s=cpu_s, ranks=args.ranks, steps=args.steps)


if __name__ == "__main__":
    sys.exit(main())
