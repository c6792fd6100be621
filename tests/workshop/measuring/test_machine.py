"""What is printed beside figures: the processor's weaknesses, and calls of helpers, none of which may be left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_proxy.workshop.measuring.machine import mitigations, processor

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = {"driver.h", "explaining.h", "target.h", "socket.h"}  # no part of the tc datapath
# Byte orders; a load that the kernel makes of a call; and the call that counted.bpf.c takes the place of.
NO_CALLS = {"bpf_htons", "bpf_htonl", "bpf_ntohs", "bpf_ntohl", "bpf_jiffies64", "bpf_tail_call"}


def test_every_helper_of_the_datapath_is_counted() -> None:
    headers = [path.read_text() for path in (ROOT / "bpf").glob("*.h") if path.name not in ELSEWHERE]
    called = set(re.findall(r"\b(bpf_[a-z0-9_]+)\(", "".join(headers))) - NO_CALLS
    counted = re.findall(r"^#define (bpf_\w+)\(", (ROOT / "workshop/benchmarks/counting.h").read_text(), re.MULTILINE)
    assert called - set(counted) == set()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("Not affected\n", None, id="not affected: left out"),
        pytest.param("Mitigation: untrained return thunk\n", "untrained return thunk", id="mitigated"),
        pytest.param("Vulnerable\n", "Vulnerable", id="vulnerable"),
    ],
)  # fmt: skip
def test_what_the_kernel_does_about_a_weakness(tmp_path: Path, text: str, shown: str | None) -> None:
    (tmp_path / "retbleed").write_text(text)
    assert mitigations(tmp_path).get("retbleed") == shown


def test_a_processor_has_a_name(tmp_path: Path) -> None:
    known = tmp_path / "cpuinfo"
    known.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7281\n")
    assert processor(known) == "AMD EPYC 7281"
    assert processor(tmp_path / "absent")
