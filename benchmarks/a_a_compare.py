"""`muster bench compare` on a noisy machine: how often it is wrong about equals, how often it finds what is slower.

    A      as it is                                  A against A'    any verdict but "same" and "no verdict" is false
    A'     as it is                                  A against +10   "worse" is wanted in 95 % of comparisons
    +10    every call takes 10 % longer              A against +25   "worse" is wanted always
    +25    every call takes 25 % longer

One comparison is `--launches` fresh launches of each: the real engine, with launch managers that fork launch workers,
which make process groups over gloo. Launches take turns, such as A +10 A' +25 +25 A' +10 A, in another order every
eight, so that any two of the four are interleaved A B B A. The slowdown is made, not multiplied: after each call of the
measured operation that rank's process spins for another tenth (quarter) of the time that the call took on it, before
its clock is read. Where others want the cores as well that costs more than a tenth: the last column says how much was
made of it. `--inject clock` lets the ranks' clocks run fast by a tenth (quarter) instead: just that and nothing else. A
comparison's answer is the one that `--fail-on worse` goes by: any row, or all rows together. How noisy the machine was
is told by the same launches: (slowest - quickest) / median of every three of A in a row, and the share of the cores
that others took. Of 50 comparisons 5 % are two.

    .venv/bin/python benchmarks/a_a_compare.py [--quick] [--comparisons 50] [--launches 32] [--minutes 24] [--keep DIR]
    .venv/bin/python benchmarks/a_a_compare.py --from DIR      judge kept records again, measure nothing
"""

import argparse
import os
import random
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Options, finish, table, verdict

from muster.collectives_bench.records import Block, Result
from muster.collectives_bench.results.files import read_result
from muster.collectives_bench.results.rows import rows_of
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.measuring.compare import Comparison, comparison

ARMS = {"A": 1.0, "A'": 1.0, "+10": 1.10, "+25": 1.25}
FALSE_REACH, FOUND_REACH = 0.05, {"+10": 0.95, "+25": 1.0}
WORDS = ("worse", "better", "same", "no verdict")
RANKS = 2
QUICK_MINUTES = 2.5


def settings_of(launches: int, seed: int) -> BenchSettings:
    """Return what a launch measures: six short rows."""
    return BenchSettings(
        operation=["all_reduce", "all_gather", "broadcast"],
        sizes=[64 * 2**10, 2**20],
        backend="gloo",
        device="cpu",
        launches=launches,
        block_s=0.02,
        check=False,
        seed=seed,
    )


def arm_of(launch: int, seed: int) -> str:
    """Name the arm of a launch: the arms in a random order, then backwards, then in another order.

    Random, for a launch is slower after one that used the cores more, where others want them too.
    """
    turn, place = divmod(launch, len(ARMS))
    arms = random.Random(f"{seed}/{turn // 2}").sample(list(ARMS), len(ARMS))
    return arms[place if turn % 2 == 0 else len(arms) - 1 - place]


def slow_down(inject: str) -> None:
    """Make the launch workers of this process slower by the factor of their launch's arm."""
    from muster.collectives_bench.ranks import launch_manager, operations, sampling

    play, prepare, loop = launch_manager.play, operations.prepare, sampling.HostClock.loop

    def slower_play(bench_ranks, settings, cells, order, tell, page):
        factor = ARMS[arm_of(order.launch, settings.seed)]

        def slower_prepare(*arguments):
            call = prepare(*arguments)
            if factor > 1 and inject == "spin":
                call.run = spinning(call.run, factor)
            return call

        operations.prepare = slower_prepare
        if inject == "clock":
            sampling.HostClock.loop = lambda self, run, calls: loop(self, run, calls) * factor
        play(bench_ranks, settings, cells, order, tell, page)

    launch_manager.play = slower_play


def spinning(run: Callable[[], None], factor: float) -> Callable[[], None]:
    """Return a call that takes `factor` times as long on this rank."""

    def slower() -> None:
        started = time.perf_counter()
        run()
        until = started + (time.perf_counter() - started) * factor
        while time.perf_counter() < until:
            pass

    return slower


def rank_main(rank: int, port: int, path: Path, settings: BenchSettings, inject: str) -> int:
    """Be one rank of the job: conduct every launch."""
    import torch

    from muster.collectives_bench.ranks.run import BenchTask, conduct

    torch.set_num_threads(1)
    slow_down(inject)
    env = RankEnv(rank, RANKS, rank, RANKS, 0, 1, "127.0.0.1", port)
    return conduct(BenchTask(settings, env, path, "a-a", 60.0))


def measure(path: Path, settings: BenchSettings, inject: str) -> None:
    """Run a job's ranks in forks of this process, which imports torch for them once."""
    import torch  # noqa: F401

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # rank 0 prints the table of a job
                code = rank_main(rank, port, path, settings, inject)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def measured(folder: Path, args: argparse.Namespace, limit_s: float) -> list[Path]:
    """Measure one comparison after another, as many as the time allows; return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    started, paths = time.monotonic(), []
    for number in range(args.comparisons):
        spent_s = time.monotonic() - started
        if number and spent_s * (number + 1) / number > limit_s:
            print(f"{number} of {args.comparisons} comparisons took {spent_s:.0f} s: the time is over")
            break
        paths.append(folder / f"comparison-{number:03d}.jsonl")
        paths[-1].unlink(missing_ok=True)
        measure(paths[-1], settings_of(args.launches * len(ARMS), seed=number), args.inject)
    return paths


def arms_of(path: Path) -> dict[str, list[Block]]:
    """Read one comparison's launches and sort them by arm."""
    arms: dict[str, list[Block]] = {arm: [] for arm in ARMS}
    result = read_result([path])
    seed = result.headers[0].settings.seed
    for block in result.blocks:
        arms[arm_of(block.launch, seed)].append(block)
    return arms


def compared(arms: dict[str, list[Block]]) -> dict[str, Comparison]:
    """Compare every other arm with A."""
    rows = {arm: rows_of(Result(blocks=blocks)) for arm, blocks in arms.items()}
    return {arm: comparison(rows["A"], rows[arm]) for arm in list(ARMS)[1:]}


def noise(equals: Sequence[Sequence[Block]]) -> dict[str, float]:
    """Say how noisy the machine was, by each comparison's launches of A."""
    spreads, shares = [], []
    for row in (row for blocks in equals for row in rows_of(Result(blocks=list(blocks)))):
        medians = row.launch_medians_us
        for i in range(0, len(medians) - 2, 3):
            three = sorted(medians[i : i + 3])
            spreads.append((three[2] - three[0]) / three[1])
        shares += [share for share in row.launch_foreign if share is not None]
    return {"spread_of_three": statistics.median(spreads), "foreign": statistics.median(shares) if shares else -1.0}


def rows_from(found: Sequence[dict[str, Comparison]], launches: int) -> list[dict[str, object]]:
    """Print how often each arm was judged how; return a row for each, held to its reach."""
    rows, cells = [], []
    for arm in list(ARMS)[1:]:
        answers = Counter(each[arm].verdict for each in found)
        share = {word: answers[word] / len(found) for word in WORDS}
        worse = sum(each[arm].count("worse") for each in found) / sum(len(each[arm].rows) for each in found)
        ratio = statistics.median(each[arm].together.ratio or 1.0 for each in found)
        if arm in FOUND_REACH:
            reached = share["worse"] >= FOUND_REACH[arm]
            said = f"found {verdict(reached, FOUND_REACH[arm], '>=')}"
        else:
            reached = share["worse"] + share["better"] <= FALSE_REACH
            said = f"false {verdict(reached, FALSE_REACH)}"
        cells.append([arm, *(f"{share[word]:.0%}" for word in WORDS), f"{worse:.0%}", f"{ratio:.3f}", said])
        rows.append(
            {"name": f"A against {arm}", "reached": reached, "answers": answers, "rows_worse": worse, "ratio": ratio}
        )
    print(f"{len(found)} comparisons of {launches} launches each")
    table(["A against", *WORDS, "rows worse", "ratio", "reach"], cells)
    return rows


def main() -> int:
    """Measure, compare, report."""
    parser = Options(__doc__, quick={"minutes": QUICK_MINUTES})
    parser.add_argument("--comparisons", type=int, default=50)
    parser.add_argument("--launches", type=int, default=32, help="of each arm in a comparison")
    parser.add_argument("--inject", choices=("spin", "clock"), default="spin", help="how calls are made slower")
    parser.add_argument("--minutes", type=float, default=24.0, help="begin no comparison that would end after this")
    parser.add_argument("--keep", type=Path, help="a folder for the records of all launches")
    parser.add_argument("--from", dest="recorded", type=Path, help="judge a folder that was kept, measure nothing")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if args.recorded:
            paths = sorted(args.recorded.glob("comparison-*.jsonl"))
        else:
            paths = measured(args.keep or Path(folder), args, 60 * args.minutes)
        arms = [arms_of(path) for path in paths]
    machine = noise([each["A"] for each in arms])
    print(f"launches of A spread by {machine['spread_of_three']:.0%} (of three)")
    print(f"other programs used {machine['foreign']:.0%} of the CPUs")
    launches = len({block.launch for block in arms[0]["A"]})
    rows = rows_from([compared(each) for each in arms], launches)
    facts = {"comparisons": len(arms), "launches": launches, "seconds": time.monotonic() - started, **machine}
    return finish(args, "a_a_compare", rows, **facts)


if __name__ == "__main__":
    sys.exit(main())
