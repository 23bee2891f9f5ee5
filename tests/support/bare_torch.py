"""A virtual environment that has torch, what torch requires, and no package of Muster's."""

import re
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def torch_alone(folder: Path) -> Path:
    """Make the environment, by links to this one's packages; return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wanted, seen = ["torch"], set[str]()
    while wanted:
        if (name := wanted.pop()) in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # required elsewhere, such as by Windows
            continue
        wanted += [re.split(r"[^\w.-]", each)[0] for each in found.requires or () if "extra ==" not in each]
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (packages / top).symlink_to(Path(sysconfig.get_paths()["purelib"], top))
    return folder / "bin/python"
