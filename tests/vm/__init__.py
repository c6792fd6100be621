"""Tests on other kernels: Debian's own, downloaded when needed, booted by QEMU on this machine's files.

`python -m tests.vm run 6.1 -- CMD` runs one command; `Machine` is the same as a function. docs/kernels.md says
the rest. Works without KVM (QEMU translates instructions then; Python is about 25 times slower).
"""
