"""Contents of the box's files for ssh and the C library, and argvs of ssh programs and nsenter. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from muster.cloudlab.box.paths import BoxPaths, NodePaths
from muster.cloudlab.box.spec import HEAD, BoxSpec

LOGIN: Final = "root"
ROOT_HOME_FIELD: Final = 5  # index of the home folder in a line of /etc/passwd


def hosts_file(spec: BoxSpec, host_name: str) -> str:
    """Return /etc/hosts for every node; the host is listed by its own name, and as `gateway`."""
    names = ["gateway"] + ([host_name] if host_name and host_name not in (*spec.members, "localhost") else [])
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    lines += [f"{spec.address(node)} {node}" for node in spec.members]
    lines.append(f"{spec.bridge_address} {' '.join(names)}")
    # torch looks up IPv4 addresses in IPv6 notation, and prints a warning if they have no name. These entries have
    # separate names, because a node's own name must resolve to its plain address first.
    lines += [f"::ffff:{spec.address(node)} {node}-v6" for node in spec.members]
    return "\n".join(lines) + "\n"


def ssh_config(spec: BoxSpec, paths: BoxPaths) -> str:
    """Return the configuration of ssh: for `ssh -F` on the host, and for root's ~/.ssh in a node."""
    lines = [f"# Part of the box {spec.name}; `muster box down` removes this file."]
    for node in spec.members:
        lines += [f"Host {node}", f"  HostName {spec.address(node)}"]
    lines += [
        f"Host node* {HEAD} {spec.network.removesuffix('0/24')}*",
        f"  User {LOGIN}",
        f"  IdentityFile {paths.client_key}",
        "  IdentitiesOnly yes",
        "  IdentityAgent none",
        f"  UserKnownHostsFile {paths.known_hosts}",
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        "  UpdateHostKeys no",
        "  PreferredAuthentications publickey",
        "  KexAlgorithms ^curve25519-sha256",
        "  AddressFamily inet",
        "  LogLevel ERROR",
    ]
    return "\n".join(lines) + "\n"


def sshd_config(paths: BoxPaths) -> str:
    """Return the configuration of every node's sshd, which does not read the configuration of the machine."""
    return "\n".join(
        [
            f"AuthorizedKeysFile {paths.authorized_keys}",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "UseDNS no",
            "StrictModes no",
            "PidFile none",
            "PrintMotd no",
            "PrintLastLog no",
            "MaxStartups 1000",
            "MaxSessions 1000",
            "AllowTcpForwarding yes",
            "Subsystem sftp internal-sftp",
            "",
        ]
    )


def sshd_argv(sshd: str, paths: BoxPaths, node: NodePaths, session: Mapping[str, str]) -> list[str]:
    """Return the argv of a node's sshd; `session` is added to the environment of every login."""
    argv = [sshd, "-D", "-e", "-f", str(paths.sshd_config), "-h", str(node.host_key)]
    if session:  # all variables are in one SetEnv, because sshd uses only the first SetEnv
        argv += ["-o", "SetEnv=" + " ".join(f'"{name}={value}"' for name, value in session.items())]
    return argv


def known_hosts(spec: BoxSpec, public_keys: Mapping[str, str]) -> str:
    """Return the text of known_hosts: the host keys of all nodes, by name and by address."""
    return "".join(f"{node},{spec.address(node)} {' '.join(key.split()[:2])}\n" for node, key in public_keys.items())


def passwd(text: str, home: str) -> str:
    """Return the text of /etc/passwd with another home for root, for sshd's logins."""
    return "".join(f"{_with_home(line, home)}\n" for line in text.splitlines())


def keygen_argv(path: str, comment: str) -> list[str]:
    """Return the argv that creates a key without a passphrase."""
    return ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path]


def exec_argv(nsenter: str, pid: int, argv: Sequence[str], *, folder: str, environment: Mapping[str, str]) -> list[str]:
    """Return the argv that runs a command inside a node, in a folder, with additional variables."""
    words = [f"{name}={value}" for name, value in environment.items()]
    enter = [nsenter, "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
    return [*enter, "env", f"--chdir={folder}", *words, *argv]


def faketime(library: str, offset: str) -> dict[str, str]:
    """Return the environment that makes a program see a shifted clock."""
    return {"LD_PRELOAD": library, "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def _with_home(line: str, home: str) -> str:
    fields = line.split(":")
    if fields[0] == LOGIN and len(fields) > ROOT_HOME_FIELD:
        fields[ROOT_HOME_FIELD] = home
    return ":".join(fields)
