"""Another user of this machine, for tests of what strangers can do."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

OTHER_UID = 65534
AS_OTHER = ["setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups", "--"]
needs_other_user = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@contextmanager
def public_folder() -> Iterator[Path]:
    """Make a folder that other users can enter; those of pytest are closed to them."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
