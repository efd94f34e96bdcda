"""Engines by kind; each is imported only when asked for."""

from __future__ import annotations

from rlboost_runtime.engines.base import Engine, EngineSpec
from rlboost_runtime.errors import ConfigError


def make_engine(spec: EngineSpec) -> Engine:
    """Return an engine of `spec.kind`, not started. Raises `ConfigError` for an unknown kind."""
    match spec.kind:
        case "transformers":
            from rlboost_runtime.engines.transformers import TransformersEngine

            return TransformersEngine(spec)
        case "vllm":
            from rlboost_runtime.engines.vllm.engine import VllmServerEngine

            return VllmServerEngine(spec)
        case "emulated":
            from rlboost_runtime.engines.emulated import EmulatedEngine

            return EmulatedEngine(spec)
        case _:
            raise ConfigError(f"no engine of kind {spec.kind!r}", "use vllm or transformers")
