"""Programs that find this folder in PYTHONPATH have no `torch._dynamo`, whose import costs each 2 s of CPU time.

The wrappers and optimizers of PyTorch import it to exclude themselves from a compilation that is not there.
"""

import sys
from unittest.mock import Mock

sys.modules["torch._dynamo"] = Mock(disable=lambda call, *_, **__: call)
