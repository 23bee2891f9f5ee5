"""The handshake by which a dialling agent and its supervisor prove to each other that they hold a node's key.

    agent                                                        supervisor
      muster/1 agent NODE NONCE DIALLED              ──────→
                                                     ←──────     muster/1 supervisor RUN ATTEMPT NONCE PROOF
      PROOF                                          ──────→
                                                     ←──────     muster/1 welcome          (or: refused WHY)
      … and only now messages, both ways

A proof is HMAC-SHA256 (RFC 2104) under the node's key over the prover's role, the run, attempt and node, both nonces,
and the address that the agent dialled. So the key is never sent, and a proof is valid for one connection only. A proof
cannot be reflected to its sender, because it contains the role. A third party cannot relay the handshake from another
address, because a proof contains the address.

A run has one secret. The key of a node is HMAC-SHA256 of its number under the secret. If each node gets only its own
key (agents started by hand), no node can impersonate another. Lines are ASCII, at most LONGEST bytes, and are not JSON.

Agents and ranks that copy or read the state in the memory of nodes use the same handshake; the one that dials is then
the agent, and the one that listens the supervisor (`jobs/checkpoint/remote.py`).

Agents import this module before they greet, so it imports only `hmac` and `os`.
"""

import hmac
import os

VERSION = "muster/1"
LONGEST = 1024  # maximum bytes of a line
NONCE_BYTES = 16
SECRET_BYTES = 32
AGENT, SUPERVISOR = "agent", "supervisor"
WELCOME, REFUSED = f"{VERSION} welcome\n".encode(), f"{VERSION} refused "


class HandshakeError(Exception):
    """The other end did not prove that it holds the key, or speaks another protocol."""


def new_secret() -> str:
    """Return the secret of a run."""
    return os.urandom(SECRET_BYTES).hex()


def node_key(secret: str, node: int) -> str:
    """Return the key of a node."""
    return hmac.digest(secret.encode(), f"{VERSION} node {node}".encode(), "sha256").hex()


class TurnedAwayError(Exception):
    """The supervisor has proved that it holds the key, and refuses this agent."""


class AgentSide:
    """The agent's end of one handshake."""

    def __init__(self, key: str, node: int, dialled: str) -> None:
        self.key = key
        self.node = node
        self.dialled = dialled
        self.nonce = os.urandom(NONCE_BYTES).hex()

    def greeting(self) -> bytes:
        """Return the agent's first line."""
        return f"{VERSION} {AGENT} {self.node} {self.nonce} {self.dialled}\n".encode()

    def answer(self, line: bytes) -> bytes:
        """Check the supervisor's proof, and return the line with the agent's proof.

        Raises:
            HandshakeError: if the other end does not hold the key.
        """
        words = words_of(line)
        if words[:2] != [VERSION, SUPERVISOR] or len(words) != 6:
            raise HandshakeError("speaks another protocol")
        run, attempt, nonce, theirs = words[2:6]
        about = (run, attempt, str(self.node), self.nonce, nonce, self.dialled)
        if not hmac.compare_digest(theirs, proof(self.key, SUPERVISOR, about)):
            raise HandshakeError("does not hold this agent's key")
        return proof(self.key, AGENT, about).encode() + b"\n"

    @staticmethod
    def check_welcome(line: bytes) -> None:
        """Check the supervisor's last line.

        Raises:
            TurnedAwayError: if the supervisor refuses this agent; the text is its reason.
        """
        if line != WELCOME:
            raise TurnedAwayError(" ".join(words_of(line)).removeprefix(REFUSED) or "no reason")


class SupervisorSide:
    """The supervisor's end of one handshake. `greeting`: the agent's node number, nonce and dialled address."""

    def __init__(self, key: str, greeting: tuple[int, str, str], run: str, attempt: int) -> None:
        node, nonce, dialled = greeting
        self.key = key
        self.about = (run, str(attempt), str(node), nonce, os.urandom(NONCE_BYTES).hex(), dialled)

    def challenge(self) -> bytes:
        """Return the supervisor's line, with its proof."""
        run, attempt, _, _, nonce, _ = self.about
        return f"{VERSION} {SUPERVISOR} {run} {attempt} {nonce} {proof(self.key, SUPERVISOR, self.about)}\n".encode()

    def is_proved(self, line: bytes) -> bool:
        """Return whether the agent's second line is a valid proof."""
        return hmac.compare_digest(line.strip(), proof(self.key, AGENT, self.about).encode())


def read_greeting(line: bytes) -> tuple[int, str, str]:
    """Return node, nonce and dialled address from an agent's first line.

    Raises:
        HandshakeError: if the line is not a greeting.
    """
    words = words_of(line)
    if len(words) != 5 or words[:2] != [VERSION, AGENT] or not (len(words[2]) < 8 and words[2].isdecimal()):
        raise HandshakeError("speaks another protocol")
    return int(words[2]), words[3], words[4]


def words_of(line: bytes) -> list[str]:
    """Return the words of a complete line of printable ASCII; an empty list for any other line."""
    if not line.endswith(b"\n") or not line.isascii():
        return []
    words = line.decode("ascii").split()
    return words if all(word.isprintable() for word in words) else []


def proof(key: str, role: str, about: tuple[str, ...]) -> str:
    """Return the proof that `role` holds the key; no part of `about` contains a newline."""
    return hmac.digest(key.encode(), "\n".join((VERSION, role, *about)).encode(), "sha256").hex()
