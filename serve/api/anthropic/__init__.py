"""Anthropic's messages, answered by the chat route."""
