"""serve-llm: an LLM inference server whose scheduler you can see into and steer."""

__version__ = "0.1.0"
