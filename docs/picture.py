"""Run the README's example and draw its output as docs/run.svg: .venv/bin/python docs/picture.py"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
COMMAND = "muster run jobs/examples/vgg11.yaml"
WIDTH = 100
# As rich's own, without the fonts that it loads from the network.
PAGE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img"
  aria-label="muster run: ranks join, losses fall, the run ends with 0">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def main() -> None:
    """Run the job in a folder of its own, so that its paths are short, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "jobs").symlink_to(HERE.parent / "jobs")
        words = [sys.executable, "-m", "muster", *COMMAND.split()[1:]]
        done = subprocess.run(
            words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        )
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ {COMMAND}", style="bold green"))
    for line in done.stdout.splitlines():
        console.print(Text(line, style="bold" if line.startswith(("epoch", "done")) else ""), soft_wrap=False)
    console.save_svg(str(HERE / "run.svg"), title=COMMAND, theme=MONOKAI, code_format=PAGE, unique_id="run")


if __name__ == "__main__":
    main()
