"""Answers in a form: which tokens may come next, for requests with a grammar."""
