"""Guesses at a request's next tokens: who makes them, and how many are worth verifying."""
