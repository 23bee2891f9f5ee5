"""Values derived from the keys of `train.model`, for `ModelSettings` and for `PlainModel`; see `rules.py`."""

from typing import TYPE_CHECKING

from muster.jobs.models.shapes import VGG_SHAPES


class ModelRules:
    """Values derived from the keys of `train.model`."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str | None:
            """The key `name`."""

        @property
        def make(self) -> str | None:
            """The key `make`."""

        @property
        def context(self) -> int | None:
            """The key `context`."""

        @property
        def tied(self) -> bool:
            """The key `tied`."""

        @property
        def dropout(self) -> float:
            """The key `dropout`."""

    @property
    def is_vgg(self) -> bool:
        """True for a VGG, which reads images."""
        return self.name in VGG_SHAPES

    @property
    def reads_tokens(self) -> bool:
        """True if the built-in data sets supply this model with tokens instead of images."""
        return self.context is not None if self.make is not None else not self.is_vgg

    @property
    def ties_head(self) -> bool:
        """True if this is a built-in model whose head and embedding share their weight."""
        return self.tied and self.make is None and not self.is_vgg

    @property
    def draws(self) -> bool:
        """True if a forward may draw random numbers."""
        return self.make is not None or self.dropout > 0.0

    @property
    def title(self) -> str:
        """The name of the model in messages."""
        return self.make or self.name or "gpt"
