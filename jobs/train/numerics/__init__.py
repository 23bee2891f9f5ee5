"""Numerics of training: dtypes, and how layers are run (`precision`, `compile` and related settings)."""

from muster.jobs.train.numerics.numerics import Numerics as Numerics
from muster.jobs.train.numerics.numerics import numerics_of as numerics_of
