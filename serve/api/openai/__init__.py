"""OpenAI's completions, chat completions and responses."""
