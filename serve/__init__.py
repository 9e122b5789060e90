"""serve-llm: an LLM inference server whose scheduler you can see into and steer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.llm import LLM
    from serve.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first used: the engine takes seconds to import."""
    if name == "LLM":
        from serve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from serve.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
