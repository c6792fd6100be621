"""Measurement in the kernel: how long packets take in each stage, what answers, what is lost. bcc is optional."""
