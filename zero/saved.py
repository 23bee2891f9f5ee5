"""What autograd saves in a forward: parameters of freed units are gathered again before they are read."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muster.zero.windows import Window


class Saved:
    """Hooks of saved tensors; `opens` makes a window's parameters whole, in a backward."""

    def __init__(self, windows: Sequence[Window], opens: Callable[[Window], None]) -> None:
        self._of = {home.full.untyped_storage()._cdata: window for window in windows for home in window.homes}
        self._opens = opens

    def pack(self, saved: Tensor) -> tuple[Tensor, int, Window | None]:
        """Note of which window a saved tensor is a part, and its version, which PyTorch leaves to hooks."""
        strided = saved.layout == torch.strided
        return saved, saved._version, self._of.get(saved.untyped_storage()._cdata) if strided else None

    def unpack(self, packed: tuple[Tensor, int, Window | None]) -> Tensor:
        """Return a saved tensor, there: a graph may leave its unit in ways that no hook on outputs sees.

        Raises:
            RuntimeError: it has been written to since, as parameters are by a step.
        """
        saved, version, window = packed
        if saved._version != version:
            what = (
                "a parameter was stepped"
                if window is not None
                else f"a tensor of shape {tuple(saved.shape)} was written to"
            )
            raise RuntimeError(
                f"{what} between its forward and its backward, which needs what it was: a variable needed for gradient "
                "computation has been modified by an inplace operation"
            )
        if window is not None:
            self._opens(window)
        return saved
