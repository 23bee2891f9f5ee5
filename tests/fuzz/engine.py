"""A small fuzzer: mutate well-formed inputs, read each as a command would, and report whatever ends in a traceback.

    target = Target("hosts-file", seeds=[b"node0 slots=4\\n"], read=read_hosts)
    report = fuzz(target, seed=1, cases=2000)          # the same seed makes the same inputs
    assert not report.findings, report.text()

A reader may raise what `allowed` names: one clear line for the user. Anything else is a finding, and so is a case
that takes over `MOST_CPU_S` of processor time or over `MOST_BYTES` of memory.

**The corpus grows.** A finding is shortened and saved as `tests/fuzz/corpus/TARGET/NUMBER.bin`; the message names the
file. Mend the reader and commit the file with the change. Every file of a corpus is replayed by a test of its own and
is mutated further by the fuzzer. To look at one by hand: `replay(target, path)`.
"""

import gc
import hashlib
import json
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from muster.jobs.basics.errors import MusterError
from support.memory import little_memory

CORPUS = Path(__file__).parent / "corpus"
MOST_CPU_S = 1.0
MOST_BYTES = 200 << 20
LONGEST = 1 << 17  # of a mutated input; longer ones cost time and find nothing new
SHRINK_CPU_S = 2.0
TOKEN = re.compile(rb"[-+.eE]?[0-9][-+.0-9eE]*|(?<=[:=,])[^,}\]\n>]*")  # a number, or what follows a sign
NUMBERS = b"0 1 -1 -0 2147483648 3000000000 9223372036854775808 1e9 1e308 1e999 -1e999 NaN -Infinity 0.1 1_0".split()
BRACKETS = b'null true false "" " { } [ ] [] {} {"a":1} [[1,2]] : , # - & * *a &a ! % @ = ~ << .. / \\ \\n'.split()
LETTERS = "\u202e \ud7ff \u00e9 \uff11 \U0001f600 \ufeff \u2028 \x85 \\ud800 <a> </a> &x;".encode().split(b" ")
STRANGE = (
    b"<!DOCTYPE x>",
    b"\xff\xfe",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"\x1b]0;x\7",
    *map(bytes, zip(b"\0\r\t\n ")),
)
WORDS = (*BRACKETS, *LETTERS, *STRANGE, b"9" * 20, b"9" * 500, b"9" * 5000)
NESTS = (b"[", b"{", b'{"a":', b"- ", b"(", b"<a>", b"&a [*a,")
JSON_VALUES = (
    *rb"0 1 -1 2 0.5 -0.5 NaN Infinity -Infinity 1e999 1e300 -1e300 1e15 1e-300 1e12 3000000000 65536 100000".split(),
    *rb'253402300800 null true false "" [] {} [[]] ["a"] {"a":1} [1,2] "\ud800" "../../x" "\u0000" "\u202e"'.split(),
    *(b"9" * 30, b"9" * 399, b"-" + b"9" * 399, b"[" * 50 + b"]" * 50, b'"' + b"x" * 20000 + b'"', b'"\\u001b[2J"'),
)


@dataclass(frozen=True)
class Target:
    """One parser: well-formed inputs, and a function that reads one as the command does."""

    name: str  # of its folder in the corpus; what stands behind a colon tells several readers of one kind apart
    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    allowed: tuple[type[BaseException], ...] = (MusterError,)

    @property
    def folder(self) -> Path:
        """Where its inputs are saved."""
        return CORPUS / self.name.partition(":")[0]

    def corpus(self) -> list[Path]:
        """List the inputs that were saved, in a fixed order."""
        return sorted(self.folder.glob("*"))


@dataclass
class Report:
    """What came of some cases."""

    target: str
    seed: int
    cases: int = 0
    slowest_s: float = 0.0
    largest_bytes: int = 0
    failed: int = 0
    findings: dict[tuple[str, str], str] = field(default_factory=dict)  # what was said first of each kind

    def text(self) -> str:
        """Write it for a person: a line of figures, then every finding."""
        found = f"{self.failed} failed in {len(self.findings)} ways"
        used = f"slowest {self.slowest_s:.3f} s, largest {self.largest_bytes / 2**20:.1f} MB"
        head = f"{self.target}: {self.cases} cases of seed {self.seed}, {found}, {used}"
        return "\n".join([head, *self.findings.values()])


class TooSlowError(BaseException):
    """A reader has used more processor time than it may; no reader catches it."""


def mutants(seeds: Sequence[bytes], random: Random) -> Iterator[bytes]:
    """Yield mutated inputs endlessly."""
    while True:
        data = random.choice(seeds)
        for _ in range(random.choice((1, 1, 1, 2, 3, 5, 9))):
            data = random.choice(MUTATIONS)(data, random, seeds)[:LONGEST]
        yield data


def fuzz(
    target: Target, *, seed: int, cases: int, cpu_s: float = float("inf"), least: int = 0, most_findings: int = 20
) -> Report:
    """Read `cases` mutations; fewer, but at least `least`, once `cpu_s` of processor time are used up."""
    report, begun = Report(target.name, seed), time.process_time()
    seeds = [*target.seeds, *(path.read_bytes() for path in target.corpus())]
    for number, data in enumerate(mutants(seeds, Random(f"{target.name} {seed}"))):
        done = number >= least and time.process_time() - begun > cpu_s
        if number == cases or done or len(report.findings) == most_findings:
            break
        if (why := _case(target, data, report)) is not None:
            report.failed += 1
            if kind_of(why) not in report.findings:
                report.findings[kind_of(why)] = save(target, data, why)
    return report


def replay(target: Target, path: Path) -> str | None:
    """Read a saved input once more; return what is wrong with its reader, None if nothing is."""
    return _case(target, path.read_bytes(), Report(target.name, 0))


def save(target: Target, data: bytes, why: str) -> str:
    """Shorten an input that fails, add it to the corpus, and say so."""
    begun, step, place = time.process_time(), max(1, len(data) // 2), 0
    while step and time.process_time() - begun < SHRINK_CPU_S:
        shorter = data[:place] + data[place + step :]
        found = _case(target, shorter, Report(target.name, 0))
        if found is not None and kind_of(found) == kind_of(why):
            data = shorter
        else:
            place += step
        if place >= len(data):
            place, step = 0, step // 2
    path = target.folder / f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return f"{data[:200]!r}\nsaved as {path}\n{why}"


def kind_of(why: str) -> tuple[str, str]:
    """Return where a traceback ends and the name of its error: findings of one kind are reported once."""
    places = [line for line in why.splitlines() if line.startswith("  File")]
    return places[-1] if places else "", why.splitlines()[-1].partition(":")[0]


def _case(target: Target, data: bytes, report: Report) -> str | None:
    """Read one input within bounds; return a traceback or what it used too much of."""
    report.cases += 1
    before, begun, why = _resident(reset=True), time.process_time(), None
    try:
        with _bounded():
            target.read(data)
    except TooSlowError:
        why = traceback.format_exc(limit=-3) + f"over {MOST_CPU_S:g} s"
    except target.allowed:
        pass
    except (Exception, RecursionError):
        why = traceback.format_exc(limit=-6)
    seconds = time.process_time() - begun
    grown = _resident(reset=False) - before
    report.slowest_s, report.largest_bytes = max(report.slowest_s, seconds), max(report.largest_bytes, grown)
    if why is None and seconds > MOST_CPU_S:
        why = f"over {MOST_CPU_S:g} s"
    if why is None and grown > MOST_BYTES:
        why = f"over {MOST_BYTES >> 20} MB"
    return why


@contextmanager
def _bounded() -> Iterator[None]:
    """Interrupt what takes too long, and refuse memory beyond the bound: MemoryError.

    Python collects no garbage meanwhile: an error that is raised in a callback of the collector (hypothesis has one) is
    only printed, so the case would continue.
    """

    def interrupt(number: int, frame: object) -> None:
        raise TooSlowError

    handler = signal.signal(signal.SIGPROF, interrupt)
    collected = gc.isenabled()
    gc.disable()
    try:
        with little_memory(MOST_BYTES):
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        if collected:
            gc.enable()


def _resident(*, reset: bool) -> int:
    """Return this process's memory now and forget its peak, or return its peak since then; in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    name = "VmRSS:" if reset else "VmHWM:"
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _edit(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Put nothing, something strange, a changed bit, many of the same or a part of another input in a place."""
    begin, other = random.randint(0, len(data)), random.choice(seeds)
    end, at = begin + random.choice((0, 0, 1, 1, 2, 8, 64, LONGEST)), random.randint(0, len(other))
    part = data[begin:end]
    often = random.choice((2, 10, 1000, LONGEST // max(1, len(part))))
    new = (
        *(b"", random.choice(WORDS), random.choice(WORDS), part * often, random.choice(NESTS) * (often * 5)),
        *(part[:-1] + bytes([part[-1] ^ 1 << random.randrange(8)]) if part else b"\0", other[at : at + end - begin]),
    )
    return data[:begin] + random.choice(new) + data[end:]


def _token(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Put an interesting number, or something that is none, in the place of a number or a value."""
    tokens = list(TOKEN.finditer(data))
    begin, end = random.choice(tokens).span() if tokens else (0, 0)
    return data[:begin] + random.choice(random.choice((NUMBERS, WORDS))) + data[end:]


def _line(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Move, repeat or leave out lines."""
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    other = random.choice(random.choice(seeds).split(b"\n"))
    lines[place : place + random.randint(0, 1)] = [other] * random.choice((0, 1, 1, 2, 50))
    return b"\n".join(lines)


def _member(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Change, remove or repeat one value inside a line of JSON, which stays JSON."""
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    try:
        root = at = json.loads(lines[place])
    except (ValueError, RecursionError):
        return _token(data, random, seeds)
    while isinstance(at, (dict, list)) and at:
        key = random.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if isinstance(at[key], (dict, list)) and at[key] and random.random() < 0.7:
            at = at[key]
            continue
        match random.randrange(8):
            case 0:
                del at[key]
            case 1:
                at[key] = [at[key]] * random.choice((2, 100))
            case _:
                at[key] = json.loads(random.choice(JSON_VALUES))
        break
    lines[place] = json.dumps(root).encode()
    return b"\n".join(lines)


MUTATIONS = (_edit, _edit, _token, _line, _member, _member)
