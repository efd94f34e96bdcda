"""Facts about machines of the user's own: nobody bills them."""

from __future__ import annotations

from rlboost_providers.base.traits import ProviderTraits

PROVIDER = ProviderTraits("ssh")
