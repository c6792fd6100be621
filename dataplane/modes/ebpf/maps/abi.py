"""Offers the enums of `bpf/abi.h` as ints, and its structs as bytes. Programs are loaded before numpy is imported."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from hybrid_proxy.dataplane.errors import OtherSource
from hybrid_proxy.dataplane.modes.ebpf.maps import _abi

abi = _abi.ffi
OBJECTS = Path(__file__).parent.parent / "objects"
STORED = ("abi_limits", "frontend_flags", "service_flags", "backend_flags", "flow_flags", "origin")
OTHERS = (
    "link_kind", "verdict", "counter", "hook", "note_kind", "interface_flags", "client", "datapath", "carry_state",
    "fast_path",
)  # fmt: skip


def check_source(programs: Path) -> None:
    """Compare the sources of a checkout with those that were compiled. An installation has no sources.

    Raises:
        OtherSource: they differ.
    """
    if programs.is_dir():
        from hashlib import sha256

        sources = b"".join(path.read_bytes() for path in sorted(programs.glob("*.[ch]")))
        if sha256(sources).hexdigest() != getattr(_abi, "SOURCE", ""):
            raise OtherSource(f"the BPF objects were built from another source than {programs}: run `make bpf`")


check_source(Path(__file__).resolve().parents[4] / "bpf")


@lru_cache(maxsize=1)
def abi_constants() -> dict[str, int]:
    """Returns every enumerator of the header by name."""
    return {
        name: number for enum in (*STORED, *OTHERS) for name, number in abi.typeof(f"enum {enum}").relements.items()
    }


def stored_numbers() -> dict[str, int]:
    """Returns the limits and flags of the header that are needed to read what is stored in maps."""
    return {name: number for enum in STORED for name, number in abi.typeof(f"enum {enum}").relements.items()}


def stored_enums() -> dict[str, dict[str, int]]:
    """Returns the same by enum, with those by which the hooks of one version call the datapath of another."""
    return {enum: dict(abi.typeof(f"enum {enum}").relements) for enum in (*STORED, "hook", "datapath")}


def size_of(struct: str) -> int:
    """Returns the bytes of a struct."""
    return int(abi.sizeof(f"struct {struct}"))


def pack(struct: str, **fields: Any) -> bytes:
    """Returns a struct with these fields; the others are 0."""
    return bytes(abi.buffer(abi.new(f"struct {struct} *", fields)))
