"""The pdsh transport: one pdsh starts all agents. It cannot pass them standard input, so they dial back."""

import shlex
import shutil
from collections.abc import Sequence

from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.site import SshSettings
from muster.launch.transports.base import agent_argv
from muster.launch.transports.dialled import Dialled, Starter
from muster.launch.transports.ssh_command import base_options, explain, last_said


def pdsh_transport(
    nodes: Sequence[Host], hosts: HostSet, ssh: SshSettings, *, run: RunDir, python: str, code: str | None, fanout: int
) -> Dialled:
    """Return the pdsh transport for `nodes`.

    Raises:
        RefusedError: if pdsh is not installed, or cannot reach these hosts with their settings.
    """
    if shutil.which("pdsh") is None:
        raise RefusedError("--on pdsh: pdsh is not installed here; apt-get install pdsh, or use --on ssh")
    ports = {host.login.port if host.login else None for host in nodes}
    if len(ports) > 1:
        raise RefusedError("--on pdsh: the hosts have different ssh ports, but pdsh supports only one; use --on ssh")
    words = [*hosts.ssh_options, *base_options(ssh, port=ports.pop())]
    if spaced := [word for word in words if any(each.isspace() for each in word)]:
        raise RefusedError(f"--on pdsh: pdsh splits ssh options at spaces, as in {spaced[0]!r}; use --on ssh")
    targets = [target_of(host, ssh.user) for host in nodes]

    def command(connect: str, node: str) -> str:
        # pdsh replaces every %n by the host's position in -w. All remaining % signs must be doubled.
        agent = agent_argv(python, code, "--connect", connect, "--secret-file", str(run.token), "--node")
        return shlex.join(["exec", *agent]).replace("%", "%%") + f" {node}"

    def argv(connect: str, slot: int | None) -> list[str]:
        # -f: with fewer connections than nodes, the last agents would wait for the first ones to end.
        whom = ["-f", str(max(fanout, len(nodes))), "-w", ",".join(targets)] if slot is None else ["-w", targets[slot]]
        return ["pdsh", "-R", "ssh", *whom, command(connect, "%n" if slot is None else str(slot))]

    def told(name: str, code: int, errors: Sequence[str]) -> MusterError:
        if host := by_name.get(name):
            return explain(host, code, errors, ssh)
        return RefusedError(f"pdsh ended with code {code}: {last_said(errors)}")

    by_name = {pdsh_name(target): host for target, host in zip(targets, nodes, strict=True)}
    numbers = {name: number for number, name in enumerate(by_name)}
    for name, number in list(numbers.items()):
        numbers.setdefault(name.partition(".")[0], number)  # pdsh omits a domain that all hosts share
    return Dialled(
        "pdsh",
        len(nodes),
        run=run,
        towards=nodes[0].address,
        starter=Starter(
            argv=argv,
            environment={"PDSH_SSH_ARGS_APPEND": " ".join(words).replace("%", "%%")},
            names=numbers,
            explain=told,
        ),
    )


def target_of(host: Host, user: str | None) -> str:
    """Return the name for a host in pdsh's -w, with its login name. `user`: the login name of hosts without one."""
    login = host.login or Login(host.name)
    name = login.user or user
    return f"{name}@{login.target}" if name else login.target


def pdsh_name(target: str) -> str:
    """Return the host name that pdsh puts in front of a target's output lines."""
    return target.rpartition("@")[2]
