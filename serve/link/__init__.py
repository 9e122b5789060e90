"""Sockets between processes, and how messages travel on them."""
