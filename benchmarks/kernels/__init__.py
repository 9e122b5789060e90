"""Micro benchmarks of single kernels."""
