"""A model's files on this disk: found, fetched, and read without torch."""
