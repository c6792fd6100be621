"""Benchmarks of single parts: `python -m workshop.benchmarks NAME`; see docs/benchmarks.md."""
