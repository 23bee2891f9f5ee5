"""The system's ssh: its command line, and the meaning of its error messages. Pure.

The user's own configuration applies (`~/.ssh/config`): aliases, keys, jump hosts. The command line adds the settings
that a launcher needs: no questions, no terminal, no forwarding, a connect time-out, and a keepalive every few seconds.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login
from muster.jobs.spec.site import SshSettings

NO_SETTINGS: Final = SshSettings()
SSH_FAILED: Final = 255  # the code of ssh's own failures, and of a remote shell that a signal killed
NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


@dataclass(frozen=True)
class SshComplaint:
    """A row of the table: a pattern in the output of ssh or the node, and a message with its meaning and the remedy."""

    said: str
    means: str
    error: type[MusterError] = UnreachableError


CHANGED_KEY: Final = "its host key has changed: it was reinstalled, or the connection is intercepted; if reinstalled: "
COMPLAINTS: Final = (
    # These rows come first, because messages of Muster's agent may contain words that ssh uses, too.
    SshComplaint(r"muster agent on \S+ (?P<what>no supervisor at .*)", "{what}"),
    SshComplaint(r"muster agent on \S+ (?P<what>.*)", "{what}", RefusedError),
    # Debian's ssh prints the command to run. A node can print such text, too, so the pattern matches only commands of
    # this exact form.
    SshComplaint(
        r"(?s)HOST IDENTIFICATION HAS CHANGED.*?(?P<what>ssh-keygen -f [\w./~'\"-]+ -R [\w.:%\[\]'\"-]+)",
        CHANGED_KEY + "{what}",
    ),
    SshComplaint(
        r"(?i)HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed", CHANGED_KEY + "ssh-keygen -R {target}"
    ),
    SshComplaint(
        r"(?i)Host key verification failed|No .* host key is known",
        "its host key is not known here; check and accept it with: ssh {target} true",
    ),
    SshComplaint(
        r"(?i)Permission denied \(|Too many authentication failures",
        "it refused our key; try: ssh {target} true, and copy a key with ssh-copy-id {target}",
    ),
    SshComplaint(
        r"(?i)Could not resolve hostname|Name or service not known", "no such host name; correct it in {where}"
    ),
    SshComplaint(
        r"(?i)Connection refused", "nothing listens on its ssh port; is sshd running there, and the port right?"
    ),
    SshComplaint(
        r"(?i)timed out|banner exchange|Operation timed out",
        "no answer; is it on, and reachable from here?",
    ),
    SshComplaint(r"(?i)No route to host|Network is unreachable", "no route to it; is it on, and in this network?"),
    SshComplaint(
        r"(?i)kex_exchange_identification|Connection (closed|reset) by",
        "it closed the connection at once; its sshd may limit connections (MaxStartups): try --fanout 8",
    ),
    SshComplaint(
        r"(?i)Bad configuration option: (?P<what>\w+)",
        "ssh does not know the option {what}; correct --ssh-opt, or ssh.options in the site file",
        RefusedError,
    ),
    SshComplaint(
        r"(?i)Bad configuration option|Unsupported KEX|command-line:? line",
        "ssh does not know an option or its value; correct --ssh-opt, or ssh.options in the site file",
        RefusedError,
    ),
    SshComplaint(
        r"can't open file '[^']*-\d{8}T\d{6}\.\d{3}Z-\w+/code/muster/launch/boot\.py'",
        "it does not see the run folder with the submitted copy of the code; name shared storage with "
        "--runs DIR, or use --no-snapshot",
        RefusedError,
    ),
    SshComplaint(
        r"can't open file '(?P<what>[^']*boot\.py)'",
        "Muster's code is not there: {what}; run muster sync, or install it at the same path",
        RefusedError,
    ),
    SshComplaint(
        r"execve\(\): (?P<what>[^:]+): No such file",
        "the interpreter is not there: {what}; correct `interpreter` in the site file",
        RefusedError,
    ),
    SshComplaint(
        r"No module named '?(?P<what>[\w.]+)'?",
        "its Python lacks {what}; run ./setup.sh there, or correct `interpreter` in the site file",
        RefusedError,
    ),
    SshComplaint(r"SyntaxError|invalid syntax", "its Python is too old; Muster needs 3.10 or newer", RefusedError),
)


def ssh_argv(host: Host, hosts: HostSet, ssh: SshSettings, command: Sequence[str]) -> list[str]:
    """Return the ssh command line that runs `command` on a host. The remote shell parses it, so it is quoted once."""
    login = host.login
    options = [*hosts.ssh_options, *base_options(ssh, port=login.port if login else None)]
    if user := (login.user if login else None) or ssh.user:
        options += ["-l", user]
    return ["ssh", *options, "--", login.target if login else host.name, shlex.join(["exec", *command])]


def base_options(ssh: SshSettings, *, port: int | None) -> list[str]:
    """Return ssh's options. The user's come first, because ssh uses the first value of an option."""
    options = [word for option in ssh.options for word in ("-o", re.sub(r"\A(\w+) +", r"\1=", option))]
    options += ["-T", "-x", "-a"]  # no terminal, no X11 or agent forwarding
    options += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={ssh.connect_timeout_s}"]
    options += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR"]
    if ssh.cheap_kex:
        options += ["-o", "KexAlgorithms=^curve25519-sha256"]
    if ssh.jump:
        options += ["-J", ssh.jump]
    if port or ssh.port:
        options += ["-p", str(port or ssh.port)]
    return options


def explain(host: Host, code: int, errors: Sequence[str], ssh: SshSettings = NO_SETTINGS) -> MusterError:
    """Turn the exit of an ssh process into one error. `errors`: the lines of its standard error."""
    text = "\n".join(errors)
    if code == SSH_FAILED and not text.strip():
        text = "Connection reset by peer"  # at LogLevel=ERROR, ssh does not report a reset connection
    who, target, where = host.name, typed(host, ssh), "the hosts"
    if hop := _blamed_hop(text, ssh.jump):
        who, target, where = f"{host.name}: its jump host {hop}", hop, "--jump, or ssh.jump in the site file"
        target = f"ssh://{hop}" if ":" in hop else hop
    if code in (NOT_FOUND, NOT_EXECUTABLE):
        what = "is not there" if code == NOT_FOUND else "cannot be run"
        last = errors[-1] if errors else ""
        return RefusedError(f"{host.name}: the interpreter {what}: {last}; correct `interpreter` in the site file")
    for row in COMPLAINTS:
        if found := re.search(row.said, text):
            what = found.groupdict().get("what") or ""
            return row.error(f"{who}: " + row.means.format(target=target, what=what, where=where))
    last = last_said(errors)
    if code == SSH_FAILED:
        return UnreachableError(f"{who}: ssh failed: {last}; try: ssh {target} true")
    return UnreachableError(f"{host.name}: the agent ended with code {code}: {last}")


def last_said(errors: Sequence[str]) -> str:
    """Return the last line that a program wrote to its standard error, for a message."""
    return next((line for line in reversed(errors) if line.strip()), "no error output")


def _blamed_hop(text: str, jump: str | None) -> str | None:
    """Return the jump host that ssh's message blames; None if a jump host only failed to reach the next host."""
    if "forwarding failed" in text:
        return None
    hops = [hop.removeprefix("ssh://") for hop in (jump or "").split(",") if hop]
    names = {hop: re.sub(r":\d+\Z", "", hop.rpartition("@")[2]).strip("[]") for hop in hops}
    return next(
        (hop for hop, name in names.items() if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)), None
    )


def typed(host: Host, ssh: SshSettings = NO_SETTINGS) -> str:
    """Return the words that a user types after `ssh` to reach a host."""
    login = host.login or Login(host.name)
    options = [word for option in ssh.options for word in ("-o", option)]
    options += ["-o", f"ProxyJump={ssh.jump}"] if ssh.jump else []  # -o, because ssh-copy-id has no -J
    port, user = login.port or ssh.port, login.user or ssh.user
    options += ["-p", str(port)] if port else []
    return shlex.join([*options, f"{user}@{login.target}" if user else login.target])
