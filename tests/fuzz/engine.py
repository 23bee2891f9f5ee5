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

import hashlib
import json
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from jobs.errors import MusterError

CORPUS = Path(__file__).parent / "corpus"
MOST_CPU_S = 1.0
MOST_BYTES = 200 << 20
LONGEST = 1 << 17  # of a mutated input; longer ones cost time and find nothing new
SHRINK_CPU_S = 2.0
NUMBERS = (
    b"0 1 -1 -0 2147483648 3000000000 9223372036854775808 1e9 1e308 1e999 -1e999 NaN Infinity -Infinity 0.1 0x10 1_0"
).split()
WORDS = (
    *(b'null true false "" " { } [ ] [] {} {"a":1} [[1,2]] : , # - & * *a &a ! % @ = ~ << .. / \\ \\n'.split()),
    *("\u202e \ud7ff \u00e9 \uff11 \U0001f600 \ufeff \u2028 \x85".encode().split(b" ")),
    *(
        b"\\ud800",
        b"\xff\xfe",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\x00",
        b"\x1b[2J",
        b"\x1b]0;x\x07",
        b"\r",
        b"\t",
        b"\n",
        b" ",
    ),
    *(b"<!DOCTYPE x>", b"&x;", b"<a>", b"</a>", b"9" * 20, b"9" * 500, b"9" * 5000),
)
JSON_VALUES = (
    *("0", "1", "-1", "2", "0.5", "-0.5", "NaN", "Infinity", "-Infinity", "1e999", "1e300", "-1e300", "1e15", "1e-300"),
    *("3000000000", "65536", "100000", "null", "true", "false"),
    *(
        '""',
        "[]",
        "{}",
        "[[]]",
        '["a"]',
        '{"a": 1}',
        "[1, 2]",
        '"\\ud800"',
        '"../../x"',
        '"\\u0000"',
        '"\\u001b[2J"',
        '"\\u202e"',
    ),
    *("9" * 30, "9" * 399, "-" + "9" * 399, "[" * 50 + "]" * 50, '"' + "x" * 20000 + '"', "253402300800", "1e12"),
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


@dataclass(frozen=True)
class Finding:
    """An input that a reader did not withstand."""

    target: str
    data: bytes
    why: str


@dataclass
class Report:
    """What came of some cases."""

    target: str
    seed: int
    cases: int = 0
    slowest_s: float = 0.0
    largest_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    def text(self) -> str:
        """Write it for a person: a line of figures, then every finding."""
        head = (
            f"{self.target}: {self.cases} cases of seed {self.seed}, {len(self.findings)} findings, "
            f"slowest {self.slowest_s:.3f} s, largest {self.largest_bytes / 2**20:.1f} MB"
        )
        return "\n".join([head, *(f"{each.data[:200]!r}\n{each.why}" for each in self.findings)])


class TooSlowError(BaseException):
    """A reader has used more processor time than it may; no reader catches it."""


def mutants(seeds: Sequence[bytes], random: Random) -> Iterator[bytes]:
    """Yield mutations of inputs without an end."""
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
    seen: set[str] = set()
    for number, data in enumerate(mutants(seeds, Random(f"{target.name} {seed}"))):
        done = number >= least and time.process_time() - begun > cpu_s
        if number == cases or done or len(report.findings) == most_findings:
            return report
        why = _case(target, data, report)
        if why is not None and kind_of(why) not in seen:
            seen.add(kind_of(why))
            report.findings.append(save(target, data, why))
    raise AssertionError("mutations have no end")


def replay(target: Target, path: Path) -> str | None:
    """Read a saved input once more; return what is wrong with its reader, None if nothing is."""
    return _case(target, path.read_bytes(), Report(target.name, 0))


def save(target: Target, data: bytes, why: str) -> Finding:
    """Shorten an input that fails, and add it to the corpus."""
    data, begun = bytes(data), time.process_time()
    step = max(1, len(data) // 2)
    while step and time.process_time() - begun < SHRINK_CPU_S:
        for begin in range(0, len(data), step):
            shorter = data[:begin] + data[begin + step :]
            found = _case(target, shorter, Report(target.name, 0))
            if found is not None and kind_of(found) == kind_of(why):
                data = shorter
                break
            if time.process_time() - begun > SHRINK_CPU_S:
                break
        else:
            step //= 2
    path = target.folder / f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return Finding(target.name, data, f"saved as {path}\n{why}")


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
    """Interrupt what takes too long, and refuse memory beyond the bound: MemoryError."""

    def interrupt(number: int, frame: object) -> None:
        raise TooSlowError

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, interrupt)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_BYTES, hard))
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler)


def _resident(*, reset: bool) -> int:
    """Return this process's memory now and forget its peak, or return its peak since then; in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    name = "VmRSS:" if reset else "VmHWM:"
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _place(data: bytes, random: Random) -> int:
    return random.randint(0, len(data))


def _flip(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x00"
    place = random.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]


def _cut(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    return data[: _place(data, random)]


def _remove(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    begin = _place(data, random)
    return data[:begin] + data[begin + random.choice((1, 2, 4, 16, 100)) :]


def _insert(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    place = _place(data, random)
    return data[:place] + random.choice(WORDS) + data[place:]


def _number(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Put an interesting number, or something that is none, in the place of a number."""
    places = [place for place in range(len(data)) if data[place : place + 1].isdigit()]
    if not places:
        return _insert(data, random, seeds)
    begin = end = random.choice(places)
    while begin > 0 and data[begin - 1 : begin] in b".-+eE0123456789" and data[begin - 1 : begin]:
        begin -= 1
    while end < len(data) and data[end : end + 1] in b".-+eE0123456789":
        end += 1
    return data[:begin] + random.choice(random.choice((NUMBERS, WORDS))) + data[end:]


def _value(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Put something of another type behind a colon or an equals sign."""
    places = [place for place in range(len(data)) if data[place : place + 1] in b":=,"]
    if not places:
        return _insert(data, random, seeds)
    begin = end = random.choice(places) + 1
    while end < len(data) and data[end : end + 1] not in b",}]\n>":
        end += 1
    return data[:begin] + random.choice((b"", b" ")) + random.choice(random.choice((NUMBERS, WORDS))) + data[end:]


def _member(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Change, remove or repeat one value inside a line of JSON, which stays JSON."""
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    try:
        root = at = json.loads(lines[place])
        while isinstance(at, (dict, list)) and at:
            key = random.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], (dict, list)) or not at[key] or random.random() < 0.3:
                break
            at = at[key]
        action = random.randrange(8)
        if action == 0:
            del at[key]
        elif action == 1:
            at[key] = [at[key]] * random.choice((2, 100))
        else:
            at[key] = json.loads(random.choice(JSON_VALUES))
        lines[place] = json.dumps(root).encode()
    except (ValueError, TypeError, RecursionError, UnboundLocalError):
        return _value(data, random, seeds)
    return b"\n".join(lines)


def _double(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Repeat a part, now and then so often that depth, digits or length go beyond any bound."""
    begin = _place(data, random)
    part = data[begin : begin + random.choice((1, 1, 2, 8, 64))]
    times = random.choice((1, 1, 1, 2, 10, 1000, LONGEST // max(1, len(part))))
    return data[:begin] + part * times + data[begin:]


def _bracket(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Nest deeply."""
    place, bracket = _place(data, random), random.choice((b"[", b"{", b'{"a":', b"- ", b"(", b"<a>", b"&a [*a,"))
    return data[:place] + bracket * random.choice((2, 70, 5000, 60000)) + data[place:]


def _splice(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    other = random.choice(seeds)
    begin = _place(other, random)
    return data[: _place(data, random)] + other[begin : begin + random.randint(0, 300)] + data[_place(data, random) :]


def _line(data: bytes, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Move, repeat or leave out lines."""
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    other = random.choice(random.choice(seeds).split(b"\n"))
    lines[place : place + random.randint(0, 1)] = [other] * random.choice((0, 1, 1, 2, 50))
    return b"\n".join(lines)


MUTATIONS = (
    _flip,
    _cut,
    _remove,
    _insert,
    _insert,
    _number,
    _number,
    _value,
    _value,
    _double,
    _bracket,
    _splice,
    _line,
)
