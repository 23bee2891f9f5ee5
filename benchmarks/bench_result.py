"""Shared by the benchmarks that measure as a user does: run `muster bench`, read its records back."""

import subprocess
import sys
import tempfile
from pathlib import Path

from ranks import ROOT

from muster.collectives_bench.records import Result
from muster.collectives_bench.results.files import read_result


def muster_bench(*options: str, limit_s: float, keep: Path | None = None) -> Result:
    """Run `muster bench` with some options; return what it measured, also kept in a file if one is given.

    Raises:
        SystemExit: it ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = keep.resolve() if keep else Path(folder) / "result.json"
        argv = [sys.executable, "-m", "muster", "bench", *options, "--runs", folder, "--out", str(out)]
        # 1 is the verdict on a bad row; the rest has been measured all the same.
        code = subprocess.run(argv, cwd=ROOT, stdout=sys.stderr, timeout=limit_s, check=False).returncode
        if code not in (0, 1) or not out.is_file():
            raise SystemExit(f"muster bench ended with {code}")
        return read_result([out])
