"""Numerics of training: dtypes, and the ways to run layers (`precision`, `compile` and related settings)."""

from muster.jobs.train.numerics.numerics import Numerics as Numerics
from muster.jobs.train.numerics.numerics import numerics_of as numerics_of
