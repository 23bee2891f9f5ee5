"""Check names of hosts and users. Valid names have no characters that are special to a shell, ssh or a terminal.

Names come from hosts files, node lists, manifests, the site file and the command line. Valid names are safe in ssh and
pdsh commands, and in commands that messages print for the user to paste.
"""

import ipaddress
import re
from typing import Final

from muster.jobs.basics.errors import UsageError

MAX_PORT: Final = 65535

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_NUMBERS: Final = re.compile(r"[0-9]+(\.[0-9]+)+")
_ZONE: Final = re.compile(r"[A-Za-z0-9_.-]{1,15}")  # the name of an interface, as in fe80::1%eth0
_INTERFACE: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")  # Linux allows names of 15 bytes
_USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
# Groups: the user, a host in brackets, a host without colons, an IPv6 address, the port.
_HOP: Final = re.compile(r"(?:ssh://)?(?:([^@]*)@)?(?:\[([^][]*)\]|([^][:]*)|([^][]*))(?::([0-9]{1,5}))?")


def is_numeric(name: str) -> bool:
    """Return True for an IPv4 or IPv6 address. A link-local IPv6 address may end in %INTERFACE."""
    address, percent, zone = name.partition("%")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return not percent or (":" in address and _ZONE.fullmatch(zone) is not None)


def check_name(name: str) -> str:
    """Check that a host name is valid for ssh, Slurm and hosts files; return it.

    Raises:
        UsageError: if `name` is not a host name or an address.
    """
    if is_numeric(name):
        return name
    if _NUMBERS.fullmatch(name):
        raise UsageError(f"{name!r} is not an address; expected four numbers of at most 255, such as 10.10.1.1")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a host name; expected letters, digits, dots, - and _, such as node0")
    return name


def check_user(user: str) -> str:
    """Check that a user name is valid in USER@HOST; return it.

    Raises:
        UsageError: if `user` is not a user name.
    """
    if not _USER.fullmatch(user):
        raise UsageError(f"{user!r} is not a user name; expected letters, digits, dots, - and _, such as alice")
    return user


def check_jump(jump: str) -> str:
    """Check jump hosts in the form of `ssh -J`: [USER@]HOST[:PORT], separated by commas; return them.

    Raises:
        UsageError: if a jump host is malformed.
    """
    for hop in jump.split(","):
        match = _HOP.fullmatch(hop)
        if match is None or not 1 <= int(match[5] or 1) <= MAX_PORT:
            raise UsageError(
                f"{hop!r} is not a jump host; expected [USER@]HOST[:PORT], such as alice@gate:2222 or [::1]:22"
            )
        if match[1] is not None:
            check_user(match[1])
        check_name(next(name for name in match.groups()[1:4] if name is not None))
    return jump


def check_network(given: str) -> str:
    """Check that `given` is the name of an interface or a network in CIDR notation; return it.

    Raises:
        UsageError: if `given` is neither a name nor a network.
    """
    try:
        if "/" in given:
            ipaddress.ip_network(given, strict=False)
            return given
    except ValueError:
        pass
    if is_numeric(given) or not _INTERFACE.fullmatch(given):
        raise UsageError(
            f"{given!r} is neither an interface nor a network; expected a name such as eth1, or 10.10.1.0/24"
        )
    return given
