"""Hypothesis profiles of all packages: ``ci`` by default, more with SWAPOPT_HYPOTHESIS=deep."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("ci", max_examples=40, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("SWAPOPT_HYPOTHESIS", "ci"))
