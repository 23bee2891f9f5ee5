"""Split backwards as in zero-bubble schedules: gradients of inputs at once, gradients of weights when there is time.

    plain      F ....... B            B: dX and dW of every layer; the previous stage waits for both
    split      F ....... I .. W       I: dX, which the previous stage waits for;  W: dW, which nobody waits for

    queue = WeightQueue(module)                    # splits its linear layers and convolutions
    loss = module(inputs).sum()
    with queue.collecting(0):
        loss.backward()                            # I: also computes gradients of norms, embeddings and the like
    queue.run(0)                                   # W: weights of linear layers and convolutions

Each layer's backward is split where it computes dX and dW. So no second pass through the graph is needed, and nothing
is computed twice. The layers are in `pipe/splitting/layers.py`, and the products for dW in
`pipe/splitting/weight_gradients.py`.

Source: Qi et al. 2024, "Zero bubble pipeline parallelism". The idea to defer weight gradients layer by layer is from
DeepSeek-AI 2025, "DualPipe".
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from muster.pipe.splitting.layers import is_split, kind_of, restore, split
from muster.pipe.splitting.weight_gradients import PendingGradients, Sums

Later = Callable[[], None]


class WeightQueue:
    """The pending weight gradients of a module, grouped by key.

    Building a queue splits the module's `nn.Linear`, `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` layers, until
    `restore()`, the end of a `with`, or the queue's deletion. State dict, names and parameters do not change. A copy or
    unpickled version of a split layer is a plain layer. A layer whose weight is computed (by a norm, a mask or a
    parametrization, even if added later) runs as a plain layer. A key is any hashable object that identifies one
    backward; a pipeline uses (stage, micro-batch).

    Between `collecting` and `run`, the queue keeps the inputs of these layers and the gradients of their outputs
    without copying. Do not overwrite these tensors in between.

    `run` adds the same gradients to `.grad` as autograd would, and calls the hooks of parameters. With `exact` the bits
    are autograd's, if keys run in the order of a loop over micro-batches. To ensure this, a layer that shares its
    weight with another kind of module, such as a head tied to an embedding, is not split. Two cases still differ by
    rounding: a weight that a forward also uses directly, and, under autocast, a weight used twice in a micro-batch.

    Raises:
        ValueError: If a layer of the module is already split.
    """

    def __init__(self, module: nn.Module, *, exact: bool = False) -> None:
        self.exact = exact
        self._works: dict[Hashable, list[PendingGradients | Later]] = {}
        self._open: list[PendingGradients | Later] | None = None  # the pending work of the current key
        layers = list(module.modules())
        if taken := [type(each).__name__ for each in layers if is_split(each)]:
            raise ValueError(f"{len(taken)} layers ({taken[0]}, ...) are already split; restore their queue first")
        kinds = [kind_of(each) for each in layers]
        whole = {
            id(parameter)
            for each, kind in zip(layers, kinds, strict=True)
            if exact and kind is None
            for parameter in each.parameters(recurse=False)
        }
        self._layers: list[nn.Module] = []
        self._others: list[nn.Module] = []
        for each, kind in zip(layers, kinds, strict=True):
            if kind is not None and whole.isdisjoint(map(id, each.parameters(recurse=False))):
                split(each, kind, self)
                self._layers.append(each)
            elif kind is None and not exact and hasattr(each, "weight_queue"):
                # A tensor-parallel layer passes its weight gradients to this queue itself.
                each.weight_queue = weakref.proxy(self)
                self._others.append(each)
        weakref.finalize(self, _restore, self._layers, self._others).atexit = False

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Collect the pending weight gradients of all backwards in the block under a key. Several blocks may share a
        key.

        Raises:
            RuntimeError: If called within another `collecting` block. The backward of a split layer raises this error
            outside of a `collecting` block.
        """
        if self._open is not None:
            raise RuntimeError(f"collecting({key!r}) within another collecting(); close the other block first")
        self._open = self._works.setdefault(key, [])
        try:
            yield
        finally:
            self._open = None

    def keep(self, work: PendingGradients | Later) -> None:
        """Add pending work to the open key, from a backward or anywhere within `collecting`.

        A custom layer may pass a function without arguments, which `run` calls in order.
        """
        if self._open is None:
            raise RuntimeError(
                "the backward of a split layer ran outside of collecting(key); its weight gradients would be lost"
            )
        self._open.append(work)

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Do the pending work of a key in the order of its backward, and free the memory.

        Raises:
            RuntimeError: If nothing was collected under the key, or it has already run.
        """
        works = self._works.pop(key, None)
        if works is None or works is self._open:
            raise RuntimeError(f"run({key!r}): nothing was collected under this key, or it has already run")
        sums = Sums([each for each in works if isinstance(each, PendingGradients)], exact=self.exact)
        works.reverse()
        while works:
            work = works.pop()  # frees the memory of each piece of work when it is done
            if isinstance(work, PendingGradients):
                work.kind.run(work, sums)
            else:
                work()

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The keys whose work was collected but has not run, oldest first."""
        return tuple(self._works)

    def finish(self) -> None:
        """Check at the end of a step that all keys have run.

        Raises:
            RuntimeError: If some weight gradients are pending; the message names their keys.
        """
        if self._works:
            left = ", ".join(map(repr, list(self._works)[:4]))
            raise RuntimeError(f"{len(self._works)} backwards have pending weight gradients: call run({left}, ...)")

    def discard(self) -> None:
        """Drop all pending work, after a failed step."""
        self._works.clear()

    def restore(self) -> None:
        """Restore the plain layers. Pending work can still be run."""
        _restore(self._layers, self._others)

    def __enter__(self) -> "WeightQueue":
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


def _restore(layers: list[nn.Module], others: list[nn.Module]) -> None:
    for each in layers:
        restore(each)
    for each in others:
        each.weight_queue = None  # type: ignore[assignment]
    layers.clear()
    others.clear()
