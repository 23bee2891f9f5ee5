"""Advice on what to do after a failure, from the first matching row of a table.

A row matches by the class of the verdict (jobs/basics/exits.py), by the first failure's signal or code, and by a
pattern in the messages: the failure's message, its last lines, and the verdict's message. Specific rows come first.
"""

import re
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.machine.linux import signal_name
from muster.jobs.runfolder.rundir import RunDir

_OF_RUN: Final = re.compile(r"\bmuster (list|status|logs|why|stop|resume|checkpoint (?:list|verify))\b(?: RUN\b)?")


@dataclass(frozen=True)
class Advice:
    """One row of the table: its conditions and its advice. A condition that is None always matches.

    In `text`, `{1}` stands for the first group of `said`, `{rank}` for the failing rank. `for_run` completes commands.
    """

    text: str
    said: str | None = None
    class_name: str | None = None
    signal: str | None = None
    code: int | None = None


TABLE: Final[tuple[Advice, ...]] = (
    # Runs that did not fail, or were stopped on request.
    Advice("nothing failed; muster list shows other runs", class_name="done"),
    Advice(
        "it was stopped on purpose; muster resume continues from its last checkpoint, muster run starts a new run",
        class_name="stopped",
    ),
    Advice("it was stopped on purpose and saved nothing: muster run starts a new run", class_name="stopped-unsaved"),
    Advice(
        "it was stopped early, after a save: muster resume RUN continues it; a job that Slurm queues again continues "
        "by itself",
        class_name="requeue",
    ),
    Advice(
        "it was stopped early, without a save: muster resume RUN starts it again; a job that Slurm queues again starts "
        "by itself",
        class_name="requeue-unsaved",
    ),
    # Muster itself refused something, and its message says where.
    Advice("correct the command line; muster COMMAND --help shows its options", class_name="usage"),
    Advice("correct the job file where the message points; muster schema shows every key", class_name="bad-job"),
    Advice(
        "run muster data cifar10 on every node, then start again", said=r"(?i)muster data|cifar10.*(?:missing|not )"
    ),
    Advice(
        "muster checkpoint list shows the checkpoints, muster checkpoint verify shows their faults; if one is good, "
        "continue from it with muster resume --from STEP, else start a new run with muster run",
        class_name="no-checkpoint",
    ),
    Advice(
        "choose a folder that you can write on this host, with --runs DIR or MUSTER_RUNS",
        class_name="run-folder",
    ),
    Advice(
        "make yourself its only writer (chown, chmod go-w), or choose another folder with --runs DIR",
        class_name="untrusted",
    ),
    Advice("check the name, or choose another run: muster list shows them", class_name="not-found"),
    # A resource of the machine ran out.
    Advice(
        "free some space on the disk of the run folder, or repair it (df -h, df -i, dmesg); earlier checkpoints are "
        "intact",
        class_name="storage",
        said=r"(?i)\bsav(?:e|es|ed|ing)\b|checkpoint",
    ),
    Advice(
        "free some space (df -h and df -i show where), or choose another disk with --runs DIR",
        said=r"(?i)no space left on device|disk quota exceeded|disk is full",
    ),
    Advice(
        "the GPU is too small for this: lower train.batch_size (in a bench job: bench.sizes), raise "
        "train.grad_accumulation, or use more ranks; nvidia-smi shows who else is on it",
        said=r"(?i)cuda out of memory|CUDA error: out of memory|torch\.(?:cuda\.)?OutOfMemoryError",
    ),
    Advice(
        "ask Slurm for more memory on each node: slurm.mem in the job or site file, or --set slurm.mem=8G; or lower "
        "ranks_per_node; sacct -j JOBID -o JobID,ReqMem,MaxRSS shows the memory requested and used",
        said=r"ran out of memory.*; raise slurm\.mem",
    ),
    Advice(
        "the node is too small for this: lower train.batch_size (in a bench job: bench.sizes), or put fewer ranks on a "
        "node",
        said=r"MemoryError|can't allocate memory|Cannot allocate memory|DefaultCPUAllocator",
    ),
    Advice(
        "shared memory is full (df -h /dev/shm): lower train.loader_workers, or give the container more",
        said=r"(?i)bus error|insufficient shared memory|unable to open shared memory",
    ),
    Advice(
        "raise the limit of open files (ulimit -n), or lower train.loader_workers",
        said=r"(?i)too many open files",
    ),
    Advice("check the disk of that node (dmesg, df -h), then start again", class_name="storage"),
    Advice(
        "name the nodes' Python in the site file (interpreter:), or run ./setup.sh there; muster check shows each",
        said=r"the interpreter (?:is not there|cannot be run)|its Python (?:lacks|is too old)",
    ),
    Advice(
        "give an address of node 0 that all nodes reach (--master-addr, --iface); muster check shows each route",
        said=r"cannot reach the master at|it reaches the master",
    ),
    # The program or something it needs is missing.
    Advice("the program was not found: check its name, PATH, and workdir on that node", code=127),
    Advice(
        "the program cannot be run there: chmod +x it, name its interpreter first, or shorten its arguments", code=126
    ),
    Advice(
        "install {1} on every node for the interpreter of the ranks, or start the job in the folder that contains it",
        said=r"(?:ModuleNotFoundError|ImportError): No module named '?([\w.]+)'?",
    ),
    Advice(
        "the GPU driver and this build of PyTorch are incompatible: compare nvidia-smi with "
        'python -c "import torch; print(torch.version.cuda)", or set train.device: cpu',
        said=r"(?i)NVIDIA driver on your system is too old|no kernel image is available|CUDA driver version is insuff",
    ),
    Advice(
        "a port is in use: find older runs with muster list, and end them with muster stop RUN; "
        "if there are none, start again, because a new attempt uses a new port",
        said=r"(?i)address already in use|EADDRINUSE",
    ),
    Advice(
        "the loss is NaN or infinite: lower train.optimizer.lr, set train.clip_norm, or use a longer warm-up",
        said=r"(?i)loss (?:is|became|went) (?:nan|inf|not finite)|non-finite loss|"
        r"(?:weights|loss or gradients) are not finite",
    ),
    Advice("make the file readable under the same path on every node", said=r"FileNotFoundError|No such file"),
    Advice("give the user that runs the ranks access to it, on every node", said=r"PermissionError|Permission denied"),
    # Muster stopped restarting the run.
    Advice(
        "the program fails at this step every time, on any machine: fix it first (muster logs --rank {rank})",
        class_name="do-not-restart",
        said="the same failure at the same step",
    ),
    Advice(
        "it ends before it can save: find out why (muster logs --rank {rank}), or save more often "
        "(checkpoint.every_s, checkpoint.every_steps)",
        class_name="do-not-restart",
        said="without a new checkpoint",
    ),
    Advice(
        "bring the lost nodes back or name others (-H, -w), or accept fewer: muster resume RUN --set "
        "restart.min_nodes=N",
        said=r"the job needs .*\(restart\.min_nodes\)",
    ),
    Advice(
        "bring the lost nodes back or name others (-H, -w), or continue on fewer with another split: muster resume RUN "
        "--nodes N --set train.parallel.data=1, or another split with as many ranks",
        said=r"left, on which the job cannot continue: train\.parallel",
    ),
    Advice(
        "bring the lost nodes back or name others (-H, -w), or continue on fewer with other settings: muster resume "
        "RUN --nodes N --set train.KEY=VALUE, as the message says",
        said=r"left, on which the job cannot continue:",
    ),
    Advice(
        "find out why it fails so often: muster why shows the causes of all attempts; to allow more restarts, "
        "--set restart.max=N",
        said=r"used up \(restart\.max\)",
    ),
    # Deadlines and nodes.
    Advice(
        "muster logs --stream err --rank {rank} shows where it stopped; if a step may take that long, raise hang_s",
        class_name="timeout",
        said="no progress for",
    ),
    Advice("give it more time: raise slurm.time, or reduce the work", class_name="timeout", said="time limit"),
    Advice(
        "see its last output: muster logs --rank {1}; check that it calls init_process_group() and reaches node 0 "
        "(firewall, address), or raise rendezvous_timeout_s",
        class_name="timeout",
        said=r"ranks? (\d[\d, -]*\d|\d).*rendezvous_timeout_s",
    ),
    Advice(
        "see its last output: muster logs --rank {1}; check that every node reaches node 0 "
        "(firewall, address), or raise start_timeout_s",
        class_name="timeout",
        said=r"ranks? (\d[\d, -]*\d|\d)",
    ),
    Advice(
        "see the ranks' last output (muster logs); if they were only slow, raise start_timeout_s",
        class_name="timeout",
    ),
    Advice(
        "check that node: ping it, ssh to it, look at its dmesg; then start again, with or without it",
        class_name="unreachable",
    ),
    Advice(
        "no change to the job is needed: start it again; the node or its network failed", class_name="infrastructure"
    ),
    Advice("fix what the message names, then run again; muster plan previews the job", class_name="refused"),
    Advice("find the cause first with muster logs --rank {rank}: a restart cannot help", class_name="do-not-restart"),
    Advice(
        "its supervisor was killed, or its host is down (dmesg there says whether the kernel killed it for memory); "
        "muster stop RUN only ends leftover processes",
        class_name="lost",
    ),
    Advice(
        "its supervisor was killed, or its host is down (dmesg there says whether the kernel killed it for memory); "
        "nothing was saved: muster stop RUN ends leftover processes, muster run starts a new run",
        class_name="lost-unsaved",
    ),
    Advice(
        "a signal ended rank 0 (dmesg says whether the kernel killed it for memory), the program called os._exit, or "
        "the host is down",
        class_name="lost-direct",
    ),
    # No message matched: judge by how the process ended.
    Advice(
        "it was killed, maybe by the kernel because memory ran out (dmesg -T | grep -i 'killed process' on that node): "
        "lower train.batch_size (in a bench job: bench.sizes) or ranks_per_node, or raise slurm.mem in a Slurm job; "
        "otherwise find out who ran kill",
        signal="SIGKILL",
    ),
    Advice(
        "a crash in native code: set env: {PYTHONFAULTHANDLER: '1'} in the job for a traceback; check that all nodes "
        "have the same versions",
        signal="SIGSEGV",
    ),
    Advice("shared memory may be full: df -h /dev/shm on that node", signal="SIGBUS"),
    Advice(
        "native code aborted: the last lines give the reason (muster logs --rank {rank} --stream err)",
        signal="SIGABRT",
    ),
    Advice("this build needs a processor that the node lacks; install a build for it", signal="SIGILL"),
    Advice("it was ended from outside: by a time limit, the scheduler, or a person", signal="SIGTERM"),
    Advice("full output: muster logs --rank {rank}"),
)


def next_step(class_name: str, failure: Mapping[str, Any] | None, message: str = "") -> str:
    """Return one line of advice for a verdict's class and its first failure (a row of attempts.jsonl).

    `message`: the verdict's message. If there is no failure, or fields are missing, a general row matches.
    """
    failure = failure or {}
    rank, code, signal = failure.get("rank"), failure.get("code"), failure.get("signal") or _as_signal(failure)
    said = "\n".join([message, str(failure.get("message") or ""), *map(str, failure.get("last_lines") or ())])
    for row in TABLE:
        found = re.search(row.said, said) if row.said is not None else None
        if (
            (row.said is None or found)
            and row.class_name in (None, class_name)
            and row.signal in (None, signal)
            and row.code in (None, code)
        ):
            # If no single rank failed, show the output of all ranks.
            text = row.text.replace(" --rank {rank}", "" if rank is None else f" --rank {rank}")
            # Without spaces, `2-3,7` can be pasted as an option's value.
            return text.replace("{1}", found[1].replace(" ", "")) if found and found.re.groups else text
    raise AssertionError("the last row of the table fits everything")


def for_run(text: str, run: RunDir) -> str:
    """Complete the commands in an advice: `muster logs` becomes `muster logs RUN --runs DIR`."""
    return _OF_RUN.sub(lambda found: run.command(found[1], named=found[1] != "list"), text)


def _as_signal(failure: Mapping[str, Any]) -> str | None:
    """Return the signal n if the exit code is 128+n, as a shell reports it, else None."""
    code = failure.get("code")
    if isinstance(code, int) and code - exits.SIGNAL_BASE in signals.valid_signals():
        return signal_name(code - exits.SIGNAL_BASE)
    return None
