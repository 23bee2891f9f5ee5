"""`muster bench fit R... -o profile.json`: a cost profile fitted to results, and its error on held-out data."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.jobs.basics.errors import UsageError
from muster.launch.bench import choices, results
from muster.launch.bench.report import naming
from muster.launch.bench.showing import add_results
from muster.launch.common.options import add_json

if TYPE_CHECKING:
    from muster.collectives_bench.cost.constants import Constants
    from muster.collectives_bench.cost.curves import Curve, Errors
    from muster.collectives_bench.cost.profile import Profile

COLUMNS: Final = (
    "operation",
    "world",
    "type",
    "sizes>",
    "model",
    "alpha>",
    "beta>",
    "mean>",
    "max>",
    "in 10 %>",
    "90 %>",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_results(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE.json", required=True, help="the profile that muster predict reads"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Fit, save, and print the table of fits with their held-out errors.

    Raises:
        RefusedError: if nothing can be fitted.
        RunFolderError, StorageError: if the profile cannot be written.
    """
    from muster.collectives_bench.cost.fit import fit
    from muster.collectives_bench.cost.profile import save
    from muster.collectives_bench.records import Result

    choices.check_output("--output", args.output, (".json",))
    measured = results.read(args.results, args.runs).whole
    if not isinstance(measured, Result):
        raise UsageError("timings of models cannot be fitted; name results of collectives")
    profile = fit(measured, name=Path(args.output).stem)
    with naming("--output"):
        save(profile, Path(args.output))
    print(json.dumps(record(profile), indent=1) if args.json else render(profile))
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def record(profile: "Profile") -> dict[str, object]:
    """Return the fits and their held-out errors as plain values; the curves' points are in the profile."""
    return {
        "name": profile.name,
        "made_of": profile.made_of,
        "curves": [each.model_dump(mode="json", exclude={"points", "line"}) for each in profile.curves],
        "constants": [each.model_dump(mode="json") for each in profile.constants],
        "held_out_sizes": profile.held_out_sizes and profile.held_out_sizes.model_dump(),
        "held_out_worlds": profile.held_out_worlds and profile.held_out_worlds.model_dump(),
    }


def render(profile: "Profile") -> str:
    """Format the fits as a table, followed by the constants and the errors on all held-out data."""
    from muster.launch.common import screen

    lines = [f"# {profile.made_of}"] if profile.made_of else []
    lines += [
        "# mean, max, in 10 %: errors when one size at a time is held out (never the first or last); 90 %: the error",
        "# that 90 % of predictions stay within; alpha, beta: parameters of the line time = alpha + S * beta",
        screen.table(COLUMNS, [_cells(each) for each in profile.curves if not each.back_to_back]),
    ]
    behind = sum(each.back_to_back for each in profile.curves)
    lines += [f"and {behind} of back-to-back calls"] if behind else []
    ends = "; the first and the last size of a curve are never held out" if profile.held_out_sizes else ""
    lines += ["", *(_constants(each) for each in profile.constants)]
    lines += [
        "",
        f"held-out sizes   {text(profile.held_out_sizes)}{ends}",
        f"held-out worlds  {text(profile.held_out_worlds)}",
    ]
    return "\n".join(lines)


def text(errors: "Errors | None") -> str:
    """Format errors as one line with mean, median, maximum, and the shares within 10 % and 20 %."""
    if errors is None:
        return "not estimated: this needs three worlds, or four sizes of an operation"
    return (
        f"mean {errors.mean:.1%}, median {errors.median:.1%}, max {errors.largest:.1%}, within 10 %: "
        f"{errors.within_10:.0%}, within 20 %: {errors.within_20:.0%}, of {errors.points} points"
    )


def _cells(curve: "Curve") -> tuple[str, ...]:
    from muster.collectives_bench.sizes import time_text

    line, errors = curve.line, curve.held_out
    name = curve.operation + ("" if curve.call == "sync" else f" {curve.call}")
    world = f"{curve.nodes}x{curve.ranks // curve.nodes} {curve.backend}"
    rate = f"{1e-9 / line.beta_s:.3g} GB/s" if line.beta_s > 0 else "-"
    shares = ("-", "-", "-")
    if errors is not None:
        shares = (f"{errors.mean:.1%}", f"{errors.largest:.1%}", f"{errors.within_10:.0%}")
    sizes = str(len(curve.points))
    return (
        name,
        world,
        curve.dtype,
        sizes,
        curve.kind,
        time_text(line.alpha_s),
        rate,
        *shares,
        f"{curve.high - 1:.0%}",
    )


def _constants(constants: "Constants") -> str:
    from muster.collectives_bench.sizes import time_text

    where = "between nodes" if constants.network else "on one node"
    parts = [f"{time_text(constants.alpha_s)} a step"] if constants.alpha_s > 0 else []
    parts += [
        f"{what} {1e-9 / taken:.3g} GB/s"
        for what, taken in (
            ("a link", constants.beta_s),
            ("a rank in both directions together", constants.rank_s),
            ("all ranks of a host", constants.host_s),
            ("sums", constants.gamma_s),
            ("copies", constants.delta_s),
        )
        if taken > 0
    ]
    worlds = ", ".join(map(str, constants.worlds))
    return f"{constants.backend} {constants.dtype} {where}, worlds {worlds}: {', '.join(parts)}"
