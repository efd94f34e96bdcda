"""Facts about machines that are processes on this one."""

from __future__ import annotations

from rlboost_providers.base.traits import ProviderTraits

PROVIDER = ProviderTraits("local", launch_lag_s=0.0)
