"""A real sshd on this machine's loopback, on a high port, run by the user who runs the tests, with throw-away keys.

Every 127.x.y.z is this machine: 127.0.0.1 and 127.0.0.2 are two hosts to ssh and pdsh, and nothing listens elsewhere.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

ADDRESSES = ("127.0.0.1", "127.0.0.2")
DEADLINE_S = 20.0


def program(name: str) -> str:
    """Return a program's path; sshd must be called by it, and stands where not every user looks."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert found is not None, f"{name} is not installed; apt-get install openssh-server openssh-client pdsh"
    return found


def make_key(path: Path) -> Path:
    """Make a key pair without a passphrase."""
    argv = [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "throw-away", "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    return path


def closed_port() -> int:
    """Return a port of loopback where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Sshd:
    """The server, and what a client needs to know to reach it."""

    def __init__(self, folder: Path, *, addresses: Sequence[str] = ADDRESSES, port: int = 0, **options: str) -> None:
        self.folder = folder
        self.addresses = addresses
        self.port = port or closed_port()
        self.key = make_key(folder / "user_key")
        self.stranger = make_key(folder / "stranger_key")
        self.host_key = make_key(folder / "host_key")
        self.keys = folder / "authorized_keys"
        shutil.copy(folder / "user_key.pub", self.keys)
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(self.known())
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where root's sshd locks itself in; the package's service makes it
        self.log = folder / "sshd.log"
        settings = {
            "HostKey": str(self.host_key),
            "AuthorizedKeysFile": str(self.keys),
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "yes",
            "MaxStartups": "100",
            **options,
        }
        argv = [program("sshd"), "-D", "-f", "/dev/null", "-E", str(self.log)]
        argv += [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        argv += [word for address in addresses for word in ("-o", f"ListenAddress={address}:{self.port}")]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.create_connection((self.addresses[-1], self.port), timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, "sshd does not listen"
                time.sleep(0.02)

    def known(self) -> str:
        """Return the lines of a client that knows this server."""
        kind, text = self.host_key.with_suffix(".pub").read_text().split()[:2]
        return "".join(f"[{address}]:{self.port} {kind} {text}\n" for address in self.addresses)

    def options(self, *, key: Path | None = None, known_hosts: Path | None = None) -> list[str]:
        """Return ssh's options, as for `-o`, that make it use the throw-away keys and nothing of the user's."""
        return [
            f"IdentityFile={key or self.key}",
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            f"UserKnownHostsFile={known_hosts or self.known_hosts}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
        ]

    def close(self) -> None:
        """End the server; sessions end with their clients."""
        self.process.terminate()
        self.process.wait()
