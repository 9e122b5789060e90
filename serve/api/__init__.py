"""The HTTP side: OpenAI's JSON in front of the engine. Knows nothing of blocks or tensors."""
