"""Benchmarks of single parts: `python -m hybrid_proxy.workshop.benchmarks NAME`; see docs/benchmarks.md."""
