"""A copy of the model whose layers are gathered one by one, by `zero.layerwise`: mode zero3 with `layerwise: true`."""

from torch import Tensor

from muster.jobs.train.sharded import ShardedReplica
from muster.zero.layerwise import Layerwise


class LayerwiseReplica(ShardedReplica):
    """A copy inside a `Layerwise`: every micro-batch's gradients are shared out, layer by layer."""

    wrapper: Layerwise

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch to this rank's share."""
        with self.waits.during("backward"):
            self.wrapper.backward(loss)
