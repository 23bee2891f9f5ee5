"""Parse hosts files and node lists, and select the hosts of a job.

Each line of a hosts file names one host, or several similar hosts. These formats are accepted, and may be mixed:

    worker-0 slots=4                    DeepSpeed's
    node0 slots=2 max_slots=4           Open MPI's
    node1:4                             MPICH's: four slots (for ssh's port write port=)
    n[01-16] slots=8                    a node list
    alice@node2                         the user to log in as
    node3 address=10.10.1.4 ssh=pc7.example.org port=2222 user=alice       Muster's

`address` is the numeric address that the host's peers use. `ssh` is the name that ssh uses, if it differs. Text after #
is a comment. A host may be listed only once; slots=N gives it several slots.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import JobFileError, UsageError
from muster.jobs.basics.hostnames import MAX_PORT, check_name, check_user, is_numeric
from muster.jobs.basics.reading import SETTINGS_BYTES, read_bytes
from muster.jobs.basics.words import did_you_mean
from muster.jobs.hosts.nodelist import MAX_NAMES, expand, fold
from muster.jobs.hosts.placement import Host, Login

KEYS: Final = ("slots", "max_slots", "address", "ssh", "port", "user")
MAX_BARE_SLOTS: Final = 1024  # a larger number after a colon is probably an ssh port
MAX_MISTAKES: Final = 10
MOST_READ: Final = 1000  # stop reading after this many mistakes

_COMMENT: Final = re.compile(r"(?:^|\s)#.*")


@dataclass(frozen=True)
class HostSet:
    """The hosts of one command, their origin, and settings for the commands that reach them."""

    hosts: tuple[Host, ...]
    origin: str  # for messages: "hostfile hosts.txt", "-w n[1-4]", "manifest m.xml", "box four"
    ssh_options: tuple[str, ...] = ()  # such as ("-F", "/.../ssh_config")
    # for commands such as squeue on this machine: SLURM_CONF and others
    environment: Mapping[str, str] = field(default_factory=dict)


def read_hostfile(path: Path) -> list[Host]:
    """Read a hosts file.

    Raises:
        JobFileError: if the file cannot be read, is empty, or has wrong lines, which the message lists.
    """
    return parse_hostfile(read_text(path, "a hosts file"), str(path))


def parse_hostfile(text: str, name: str) -> list[Host]:
    """Parse the text of a hosts file; `name` is its name in messages.

    Raises:
        JobFileError: if the text is empty, or has wrong lines, which the message lists.
    """
    hosts: list[Host] = []
    mistakes: list[str] = []
    lines: dict[str, int] = {}
    left = MAX_NAMES
    for number, line in enumerate(text.splitlines(), start=1):
        plain = " ".join(_COMMENT.sub("", line).split())
        words = plain.replace(" =", "=").replace("= ", "=").split()
        if not words:
            continue
        try:
            names = expand(words[0], left)
            left -= len(names)
            found = _hosts_of_line(names, words)
            twice = next((host.name for host in found if host.name in lines), None)
            if twice is not None:
                raise UsageError(
                    f"{twice} is already in line {lines[twice]}; list it once, with slots=N for several ranks"
                )
        except UsageError as error:
            mistakes.append(f"{name}:{number}: {error}")
            if len(mistakes) == MOST_READ:
                break
            continue
        hosts += found
        lines |= dict.fromkeys((host.name for host in found), number)
    if mistakes:
        raise JobFileError(_listed(mistakes, text, name))
    if not hosts:
        raise JobFileError(f"{name}: names no host; expected one per line, such as: node0 slots=4")
    return hosts


def _listed(mistakes: Sequence[str], text: str, name: str) -> str:
    """Format the first mistakes. If the file is XML, report only that."""
    if text.lstrip().startswith("<"):
        return f"{name}: is XML, expected a hosts file; give a CloudLab manifest with --manifest"
    more, least = len(mistakes) - MAX_MISTAKES, "at least " * (len(mistakes) == MOST_READ)
    return "\n".join([*mistakes[:MAX_MISTAKES], *([f"{name}: and {least}{more} more wrong lines"] if more > 0 else [])])


def hostfile_text(hosts: Iterable[Host]) -> str:
    """Return the text of a hosts file that parses to these hosts."""
    return "".join(f"{_line_of(host)}\n" for host in hosts)


def from_nodelist(text: str) -> list[Host]:
    """Return the hosts of a node list such as `n[01-16],alice@login`.

    Raises:
        UsageError: if the text is not a node list, or a name in it is invalid or repeated.
    """
    words = expand(text)
    try:
        hosts = [_host(*_user_name_slots(word)) for word in words]
    except UsageError as error:
        raise UsageError(f"node list: {error}") from error
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:  # the same host in two forms, such as n1,alice@n1; `expand` has removed exact repeats
            raise UsageError(f"node list {text!r}: {host.name} is listed twice, in two spellings; list it once")
        seen.add(host.name)
    return hosts


def choose(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts that are in `include` but not in `exclude`, in the order of `hosts`.

    `include` and `exclude` are node lists. DeepSpeed's `host1@host2` is accepted too.

    Raises:
        UsageError: if a list names an unknown host, or no host is left.
    """
    chosen = list(hosts)
    if include is not None:
        wanted = _among(hosts, include, "--include")
        chosen = [host for host in chosen if host.name in wanted]
    if exclude is not None:
        unwanted = _among(hosts, exclude, "--exclude")
        chosen = [host for host in chosen if host.name not in unwanted]
    if not chosen and hosts:
        given = " and ".join(name for name, value in (("--include", include), ("--exclude", exclude)) if value)
        raise UsageError(f"{given}: no host of {_short(hosts)} is left; exclude fewer hosts")
    return chosen


def read_text(path: Path, wanted: str, most: int = SETTINGS_BYTES) -> str:
    """Return the text of a user's file.

    Raises:
        JobFileError: if the file does not exist, cannot be read, has more than `most` bytes or is not text. The message
            states that `wanted` was expected.
    """
    try:
        return read_bytes(path, most, owned=False).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise JobFileError(f"{path}: no such file; expected {wanted}") from error
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise JobFileError(f"{path}: cannot be read: {reason}; expected {wanted}") from error
    except UnicodeDecodeError as error:
        raise JobFileError(f"{path}: byte {error.start} is not UTF-8 text; expected {wanted}") from error
    except ValueError as error:
        raise JobFileError(f"{error}; expected {wanted}") from error


def _hosts_of_line(names: Sequence[str], words: Sequence[str]) -> list[Host]:
    values = _values(words[1:])
    named = [_user_name_slots(word) for word in names]
    if len(named) > 1 and (only := next((key for key in ("address", "ssh") if key in values), None)):
        raise UsageError(f"{only}= applies to one host, but {words[0]} names {len(named)}; give each its own line")
    slots = _number(values, "slots")
    most = _number(values, "max_slots")
    if slots is not None and most is not None and most < slots:
        raise UsageError(f"max_slots must be at least slots ({slots}), got {most}")
    port = _number(values, "port", most=MAX_PORT)
    if (address := values.get("address", "")) and not is_numeric(address):
        raise UsageError(f"address must be numeric, such as 10.10.1.1, got {address!r}; use ssh= for names")
    hosts = []
    for user, name, bare in named:
        if bare is not None and slots is not None:
            raise UsageError(f"slots is given twice: :{bare} and slots={slots}; keep one")
        if user is not None and "user" in values:
            raise UsageError(f"the user is given twice: {user}@ and user={values['user']}; keep one")
        hosts.append(_host(values.get("user", user), name, slots or bare, address, values.get("ssh"), port))
    return hosts


def _host(
    user: str | None,
    name: str,
    slots: int | None,
    address: str = "",
    target: str | None = None,
    port: int | None = None,
) -> Host:
    login = None
    if (user, target, port) != (None, None, None):
        login = Login(name if target is None else target, user, port)
    return Host(name, address or (name if is_numeric(name) else ""), slots, login)


def _user_name_slots(word: str) -> tuple[str | None, str, int | None]:
    """Split `alice@node0:4` into user, name and slots."""
    user, at, rest = word.rpartition("@")
    if at:
        check_user(user)
    if is_numeric(rest):  # an IPv6 address contains colons
        return user or None, rest, None
    name, colon, count = rest.partition(":")
    check_name(name)
    if not colon:
        return user or None, name, None
    if not count.isdecimal() or not count.isascii() or len(count) > 9 or int(count) < 1:
        raise UsageError(f"{word!r}: expected a number of slots after the colon, as in node0:4, got {count!r}")
    if int(count) > MAX_BARE_SLOTS:
        raise UsageError(
            f"{word!r}: {count} after the colon means slots; for ssh's port write port={count}, else slots={count}"
        )
    return user or None, name, int(count)


def _values(words: Sequence[str]) -> dict[str, str]:
    """Parse words of the form `key=value`."""
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not equals:
            raise UsageError(f"{word!r} is not key=value; expected one host per line, then any of {'=, '.join(KEYS)}=")
        if key not in KEYS:
            raise UsageError(f"{key}: unknown key" + (did_you_mean(key, KEYS) or f"; valid here: {', '.join(KEYS)}"))
        if key in values:
            raise UsageError(f"{key} is given twice; keep one")
        if not value:
            raise UsageError(f"{key}= has no value; remove it, or give it one")
        values[key] = value
    return values


def _number(values: Mapping[str, str], key: str, most: int = 10**6) -> int | None:
    if key not in values:
        return None
    text = values[key]
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= number <= most:
        raise UsageError(f"{key} must be a number from 1 to {most}, got {text!r}")
    return number


def _line_of(host: Host) -> str:
    words = [host.name]
    if host.address and host.address != host.name:
        words.append(f"address={host.address}")
    if login := host.login:
        if login.target != host.name or (login.user is None and login.port is None):
            words.append(f"ssh={login.target}")
        words += [f"port={login.port}"] if login.port is not None else []
        words += [f"user={login.user}"] if login.user is not None else []
    words += [f"slots={host.slots}"] if host.slots is not None else []
    return " ".join(words)


def _among(hosts: Sequence[Host], text: str, option: str) -> set[str]:
    """Return the names in a node list, after checking that all are hosts."""
    names = [host.name for host in hosts]
    found: set[str] = set()
    for part in text.split("@"):
        name, colon, _ = part.partition(":")
        if colon and not is_numeric(part):
            raise UsageError(f"{option}: {part!r} selects slots of a host; Muster uses whole hosts, so write {name}")
        found |= set(expand(part))
    if unknown := sorted(found - set(names)):
        near = did_you_mean(unknown[0], names) or ";"
        raise UsageError(f"{option}: {unknown[0]!r} is not one of the hosts{near} they are {_short(hosts)}")
    return found


def _short(hosts: Sequence[Host]) -> str:
    text = fold(host.name for host in hosts)
    return text if len(text) <= 60 else f"{text[:57]}..."
