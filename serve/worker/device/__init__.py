"""Devices: what they can do, and how bytes reach them."""
