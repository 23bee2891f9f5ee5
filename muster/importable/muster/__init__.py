"""Muster for a user's own Python: the folder above this one stands on PYTHONPATH and holds nothing but `muster`.

The subpackages and the public names are those of the real package, two folders up.
"""

import os

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib would cost every start 3 ms)
__path__ = [os.path.dirname(os.path.dirname(_here))]  # noqa: PTH120

from muster.public import find as __getattr__  # noqa: E402, F401 (found by the path above)
