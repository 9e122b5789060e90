"""`serve-llm bench`: measure any OpenAI server, or our engine without one."""
