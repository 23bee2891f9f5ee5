"""The log files of ranks: their names, and the prefix that marks a line with its rank."""

import os
import re
from pathlib import Path
from typing import Final

COLOURS: Final = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)  # terminal colours, assigned to ranks in turn
LOG_FILE: Final = re.compile(r"rank-(\d+)\.(out|err)")


def log_files(folder: Path) -> list[tuple[int, str, str]]:
    """List the log files of one attempt as (rank, stream, name)."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 (faster for thousands of names, ten times a second)
    except FileNotFoundError:
        return []
    matches = filter(None, map(LOG_FILE.fullmatch, names))
    return [(int(match[1]), match[2], match[0]) for match in matches]


def prefix(rank: int, node: int | None = None, *, coloured: bool) -> str:
    """Return the prefix for a line of a rank's output."""
    text = f"[rank {rank}]" if node is None else f"[rank {rank} node {node}]"
    return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m " if coloured else f"{text} "


def is_coloured(stream: object) -> bool:
    """Return whether to colour prefixes: the stream is a terminal, and NO_COLOR is not set."""
    return bool(getattr(stream, "isatty", lambda: False)()) and not os.environ.get("NO_COLOR")
