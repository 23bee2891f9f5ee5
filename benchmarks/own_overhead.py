"""What a session adds to a step of a user's DDP loop: CPU time of two ranks under `muster run`.

    .venv/bin/python benchmarks/own_overhead.py [--repeats 15] [--tasks vgg11,gpt-5ms]

    session   model, optimizer and sampler registered, loss and tokens logged, the ranks meet; no save is due
    bare      the same loop on the same model without a session
    again     the bare loop once more: what its ratio differs from 1 by is noise

Blocks of steps take turns, A B C C B A. Goals: at most 1.01 of the bare loop's CPU time for VGG-11, and 1.05 for a GPT
with steps of about 5 ms. What a save costs is measured by own_save.py.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator

from pairs import report
from rank_processes import tell, under_muster
from step_sides import in_turns

GOALS = {"vgg11": 1.01, "gpt-5ms": 1.05}
STEPS = {"vgg11": 12, "gpt-5ms": 300}  # of a block: the ranks of a session meet several times in each
WARM_UP = 2  # blocks of each side
SESSION, BARE, AGAIN = "session", "bare", "again"


def step_of(name: str, rank: int, tiny: bool) -> tuple[Callable[[], tuple[object, int]], dict[str, object]]:
    """Return a training step, which returns its loss and how many samples or tokens it took, and what to register."""
    import torch
    from ddp_models import TASKS, TINY, Task
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from muster.jobs.models.shapes import GptShape

    small = Task(GptShape("gpt-5ms", 64, 256, 2, 4, context=32), 2)
    task = {**(TINY if tiny else TASKS), "gpt-5ms": small}[name]
    model = DistributedDataParallel(task.build(), gradient_as_bucket_view=True, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batches = task.batches(rank)
    held = [next(batches) for _ in range(8)]  # so that no side waits for data
    place = 0

    def step() -> tuple[object, int]:
        nonlocal place
        inputs, targets = held[place]
        place = (place + 1) % len(held)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach(), targets.numel()

    return step, {"model": model, "optimizer": optimizer}


def rank_main(args: argparse.Namespace) -> None:
    """Measure one task as a rank."""
    import torch
    import torch.distributed as dist

    import muster

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = muster.session()
    step, objects = step_of(args.tasks, run.rank, args.tiny)
    state = run.state(**objects, sampler=run.sampler(1_000_000, 8), best=0.0)
    total = (WARM_UP + args.repeats) * args.steps
    steps: Iterator[int] = run.steps(total, state)

    def session() -> None:
        for _ in range(args.steps):
            next(steps)
            loss, amount = step()
            run.log(loss=loss, tokens=amount)

    def bare() -> None:
        for _ in range(args.steps):
            step()

    blocks = {SESSION: session, BARE: bare, AGAIN: bare}
    in_turns(blocks, WARM_UP)
    times = in_turns(blocks, args.repeats)
    if next(steps, None) is not None:
        raise SystemExit(f"the session's loop did not end after {total} steps")
    if run.is_main:
        tell(times)
    dist.destroy_process_group()


def compare(args: argparse.Namespace, name: str) -> bool:
    """Measure one task, and report it."""
    steps = args.steps or STEPS[name]
    arguments = ["--tasks", name, "--repeats", str(args.repeats), "--steps", str(steps)]
    arguments += ["--tiny"] if args.tiny else []
    times = under_muster(__file__, arguments, 2, "checkpoint.every_steps=1000000000")
    cpu, wall = ({side: [each[clock] / steps for each in times[side]] for side in times} for clock in (0, 1))
    noise = statistics.median(one / other for one, other in zip(cpu[AGAIN], cpu[BARE], strict=True))
    of_wall = statistics.median(one / other for one, other in zip(wall[SESSION], wall[BARE], strict=True))
    print(f"{name}: a step of {1e3 * statistics.median(wall[BARE]):.1f} ms; the bare loop again {noise:.4f} of its CPU")
    more = {"steps": steps, "wall_ratio": of_wall, "bare_again": noise}
    title = f"a session around a DDP loop, {name}, 2 ranks, CPU time of a step"
    return report(title, cpu[SESSION], cpu[BARE], reach=GOALS[name], **more)


def main() -> int:
    """Measure every task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(GOALS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=0, help="steps of a block")
    parser.add_argument("--tiny", action="store_true", help="a smaller VGG, to try the script")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args)
        return 0
    reached = [compare(args, name) for name in args.tasks.split(",")]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
