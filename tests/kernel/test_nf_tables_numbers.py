"""The numbers of nf_tables are those of the kernel's headers."""

from __future__ import annotations

import subprocess

from hybrid_proxy.dataplane.nftables import uapi

HEADERS = ("netinet/in.h", "linux/netfilter.h", "linux/netfilter_ipv4.h", "linux/netfilter/nf_tables.h")


def test_every_number_is_that_of_the_headers() -> None:
    numbers = {name: value for name, value in vars(uapi).items() if name.startswith("NF")}
    assert len(numbers) > 120
    lines = [f"#include <{header}>" for header in HEADERS]
    lines += [f'_Static_assert((unsigned){name} == (unsigned){value}, "{name}");' for name, value in numbers.items()]
    done = subprocess.run(
        ["clang", "-fsyntax-only", "-x", "c", "-"], input="\n".join(lines), text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
