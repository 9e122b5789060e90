"""The engine in a process of its own, seen from both ends."""
