"""In which numbers a model is trained, and how its layers are run: `precision`, `compile` and their like."""

from muster.jobs.train.numerics.numerics import Numerics as Numerics
from muster.jobs.train.numerics.numerics import numerics_of as numerics_of
