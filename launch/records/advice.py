"""The next step after a failure: one table, read from the top; the first row that fits speaks.

A row fits by the class of the verdict (jobs/basics/exits.py), by what the first failure is (signal, code), and by what
was said: its message, its last lines, and the verdict's own message. The special stands before the general.
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
    """One row: when it fits, and what to do then. A condition that is None always fits.

    `{1}` in `text` is the first group of `said`, `{rank}` the failing rank; `python -m`, muster lines are as typed.
    """

    text: str
    said: str | None = None
    class_name: str | None = None
    signal: str | None = None
    code: int | None = None


TABLE: Final[tuple[Advice, ...]] = (
    # What somebody decided.
    Advice("nothing failed; muster list shows other runs", class_name="done"),
    Advice(
        "it was stopped on purpose; muster resume goes on with what it saved, muster run starts anew",
        class_name="stopped",
    ),
    Advice(
        "it was stopped on purpose, and nothing of it was saved: muster run starts anew", class_name="stopped-unsaved"
    ),
    Advice(
        "it saved its work and left before its time was up: muster resume RUN goes on with it, as Slurm does by itself "
        "with a job that it queues again",
        class_name="requeue",
    ),
    Advice(
        "it left before its time was up, and Muster saved nothing at the end: muster resume RUN starts it again, as "
        "Slurm does by itself with a job that it queues again",
        class_name="requeue-unsaved",
    ),
    # What Muster itself refused: the message says where.
    Advice("correct the command line; muster COMMAND --help shows its options", class_name="usage"),
    Advice("correct the job file where the message points; muster schema shows every key", class_name="bad-job"),
    Advice(
        "run muster data cifar10 on every node, then start again", said=r"(?i)muster data|cifar10.*(?:missing|not )"
    ),
    Advice(
        "muster checkpoint list says what is there, muster checkpoint verify what is wrong with it; where one is good, "
        "muster resume --from STEP takes it, else muster run starts anew",
        class_name="no-checkpoint",
    ),
    Advice(
        "choose another folder with --runs DIR or MUSTER_RUNS, one that you can write on this host",
        class_name="run-folder",
    ),
    Advice(
        "make it yours, and closed to others (chown, chmod go-w), or choose another folder with --runs DIR",
        class_name="untrusted",
    ),
    Advice("name what is missing, or another run: muster list shows them", class_name="not-found"),
    # What the machine ran out of.
    Advice(
        "free some space on the disk of the run folder, or mend it (df -h, df -i, dmesg); the checkpoints before are "
        "whole",
        class_name="storage",
        said=r"(?i)\bsav(?:e|es|ed|ing)\b|checkpoint",
    ),
    Advice(
        "free some space (df -h and df -i show where), or choose another disk with --runs DIR",
        said=r"(?i)no space left on device|disk quota exceeded|disk is full",
    ),
    Advice(
        "the GPU is too small for this: lower train.batch_size (of a bench job: bench.sizes), raise "
        "train.grad_accumulation, or use more ranks; nvidia-smi shows who else is on it",
        said=r"(?i)cuda out of memory|CUDA error: out of memory|torch\.(?:cuda\.)?OutOfMemoryError",
    ),
    Advice(
        "ask Slurm for more memory on each node: slurm.mem in the job or site file, or --set slurm.mem=8G; or lower "
        "ranks_per_node; sacct -j JOBID -o JobID,ReqMem,MaxRSS shows the memory requested and used",
        said=r"ran out of memory.*; raise slurm\.mem",
    ),
    Advice(
        "the node is too small for this: lower train.batch_size (of a bench job: bench.sizes), or put fewer ranks on a "
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
        "give an address of node 0 that all nodes reach (--master-addr, --iface); muster check shows every node's way",
        said=r"cannot reach the master at|its way to the master",
    ),
    # What the program lacks.
    Advice("the program was not found: check its name, PATH, and workdir on that node", code=127),
    Advice(
        "the program cannot be run there: chmod +x it, name its interpreter first, or shorten its arguments", code=126
    ),
    Advice(
        "install {1} for the interpreter that runs the ranks, on every node, or start it from the folder that holds it",
        said=r"(?:ModuleNotFoundError|ImportError): No module named '?([\w.]+)'?",
    ),
    Advice(
        "the GPU driver and this build of PyTorch do not fit: compare nvidia-smi with "
        'python -c "import torch; print(torch.version.cuda)", or set train.device: cpu',
        said=r"(?i)NVIDIA driver on your system is too old|no kernel image is available|CUDA driver version is insuff",
    ),
    Advice(
        "a port is taken, maybe by ranks of an older run: muster list shows them, muster stop RUN ends one; "
        "else start again: a new attempt takes a new port",
        said=r"(?i)address already in use|EADDRINUSE",
    ),
    Advice(
        "the loss is no number any more: lower train.optimizer.lr, set train.clip_norm, or warm up longer",
        said=r"(?i)loss (?:is|became|went) (?:nan|inf|not finite)|non-finite loss|"
        r"(?:weights|loss or gradients) are not finite",
    ),
    Advice(
        "make the file readable on every node: the path must be the same there", said=r"FileNotFoundError|No such file"
    ),
    Advice("give the user that runs the ranks access to it, on every node", said=r"PermissionError|Permission denied"),
    # What restarts did not mend.
    Advice(
        "the program fails there every time, whatever the machine: correct it first (muster logs --rank {rank})",
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
        "bring the lost nodes back or name others (-H, -w), or go on with fewer in another split: muster resume RUN "
        "--nodes N --set train.parallel.data=1, or whatever makes as many ranks",
        said=r"left, on which the job cannot go on: train\.parallel",
    ),
    Advice(
        "bring the lost nodes back or name others (-H, -w), or go on with fewer in another way: muster resume RUN "
        "--nodes N --set train.KEY=VALUE, as the message says",
        said=r"left, on which the job cannot go on:",
    ),
    Advice(
        "find out why it fails so often: the causes of all attempts stand in muster why; for more restarts "
        "--set restart.max=N",
        said=r"used up \(restart\.max\)",
    ),
    # Deadlines and nodes.
    Advice(
        "where it stood is in muster logs --stream err --rank {rank}; if a step may take that long, raise hang_s",
        class_name="timeout",
        said="no progress for",
    ),
    Advice("give it more time: raise slurm.time, or lower the work", class_name="timeout", said="time limit"),
    Advice(
        "see what was done there last: muster logs --rank {1}; check that every node reaches node 0 "
        "(firewall, address), or raise start_timeout_s",
        class_name="timeout",
        said=r"ranks? (\d[\d, -]*\d|\d)",
    ),
    Advice(
        "see what the ranks did last (muster logs); if they were only slow, raise start_timeout_s",
        class_name="timeout",
    ),
    Advice(
        "check that node: ping it, ssh to it, look at its dmesg; then start again, with or without it",
        class_name="unreachable",
    ),
    Advice(
        "nothing to correct in the job: start it again, the node or its network failed", class_name="infrastructure"
    ),
    Advice("change job, hosts or data as the message says; muster plan shows what they make", class_name="refused"),
    Advice(
        "find the cause in muster logs --rank {rank} first: starting again cannot help", class_name="do-not-restart"
    ),
    Advice(
        "its supervisor was killed, or its host is gone (dmesg there says whether the kernel killed it for memory); "
        "muster stop RUN would only end what is left",
        class_name="lost",
    ),
    Advice(
        "its supervisor was killed, or its host is gone (dmesg there says whether the kernel killed it for memory); "
        "nothing was saved: muster stop RUN ends what is left of it, muster run starts anew",
        class_name="lost-unsaved",
    ),
    # How a process ended, when it said nothing that we know.
    Advice(
        "somebody killed it: maybe the kernel, out of memory (dmesg -T | grep -i 'killed process' on that node): "
        "lower train.batch_size (of a bench job: bench.sizes) or ranks_per_node, or raise slurm.mem in a Slurm job; "
        "else ask who ran kill",
        signal="SIGKILL",
    ),
    Advice(
        "a crash in native code: set env: {PYTHONFAULTHANDLER: '1'} in the job for a traceback; check that all nodes "
        "have the same versions",
        signal="SIGSEGV",
    ),
    Advice("shared memory may be full: df -h /dev/shm on that node", signal="SIGBUS"),
    Advice(
        "native code gave up: its reason stands in the last lines (muster logs --rank {rank} --stream err)",
        signal="SIGABRT",
    ),
    Advice("this build needs a processor that the node does not have; install one for it", signal="SIGILL"),
    Advice("somebody else ended it: a time limit, the scheduler, or a person", signal="SIGTERM"),
    Advice("its output tells more: muster logs --rank {rank}"),
)


def next_step(class_name: str, failure: Mapping[str, Any] | None, message: str = "") -> str:
    """Return what to do, in one line, after a verdict of this class and first failure (a row of attempts.jsonl).

    `message` is the verdict's own. Never fails: without a failure, or with fields missing, a general row fits.
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
            # A whole node, or nobody, failed: then all ranks' output is of interest.
            text = row.text.replace(" --rank {rank}", "" if rank is None else f" --rank {rank}")
            # Without spaces: `2-3,7` can be pasted behind an option.
            return text.replace("{1}", found[1].replace(" ", "")) if found and found.re.groups else text
    raise AssertionError("the last row of the table fits everything")


def for_run(text: str, run: RunDir) -> str:
    """Complete the commands of an advice: `muster logs` becomes `muster logs RUN --runs DIR`."""
    return _OF_RUN.sub(lambda found: run.command(found[1], named=found[1] != "list"), text)


def _as_signal(failure: Mapping[str, Any]) -> str | None:
    """Name the signal in a shell's exit code 128+n: `sh -c` returns it so."""
    code = failure.get("code")
    if isinstance(code, int) and code - exits.SIGNAL_BASE in signals.valid_signals():
        return signal_name(code - exits.SIGNAL_BASE)
    return None
