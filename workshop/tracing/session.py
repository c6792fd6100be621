"""One measurement in the kernel: its programs are loaded, attached, read, and removed with their last descriptor."""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import LOG_SIZE, BpfError, Map, Ring, check, library
from hybrid_proxy.workshop.tracing import kernel_types
from hybrid_proxy.workshop.tracing.compiler import Programs, compiled
from hybrid_proxy.workshop.tracing.rows import Event
from hybrid_proxy.workshop.tracing.targets import Targets, place_text
from hybrid_proxy.workshop.tracing.text import FIELDS, Entry, View, entries, program

_SOURCE: Final = Path(__file__).with_name("packets.c")
# Structs of packets.c.
_PLACE: Final = struct.Struct("=16sHBx")
_SETTINGS: Final = struct.Struct("=16sII")
_EVENT: Final = struct.Struct("=QQ16s16sHHBxxx8IQ16s")
_ANSWER: Final = struct.Struct("=II16sHBxI")
_SUM: Final = struct.Struct("=QQ")
_KEYS: Final = {
    "answers": _ANSWER, "drops": struct.Struct("=IIII Q 16sHBx 4x"), "repeats": struct.Struct("=II16sHBx"),
}  # fmt: skip
_ENDS, _WAITING = struct.Struct("=16s16sHHBxxx"), struct.Struct("=Q16s16sHHBxxxII")
_COUNT: Final = struct.Struct("=Q")
_NUMBER: Final = struct.Struct("=I")
_RAW_TRACEPOINT: Final = 17  # BPF_PROG_TYPE_
_SYMBOLS: Final = Path("/proc/kallsyms")


class Plan(NamedTuple):
    """The measurement: its view, the network namespace, and the client (16 bytes, IPv4-mapped; None: all)."""

    view: View
    home: int
    client: bytes | None = None


class Session:
    """A measurement. A context manager: the programs are attached on entry and removed on exit.

    `missing` has, for each point that this kernel cannot show, the reason.

    Raises:
        ControllerError: the programs cannot be compiled, or a point without which nothing can be measured is missing.
    """

    def __init__(self, plan: Plan, targets: Targets) -> None:
        self.plan = plan
        self.targets = targets
        self.missing: dict[str, str] = {}
        self.events: list[Event] = []  # so far, in the order in which they arrived
        self._stack = ExitStack()
        self._maps: dict[str, Map] = {}
        self._ring: Ring | None = None

    def __enter__(self) -> Self:
        with self._stack:
            self._open()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        # Since Linux 5.17 a kernel says why it drops a packet.
        view, reasons = self.plan.view, bool(kernel_types.enum_names("skb_drop_reason"))
        fields = {name: kernel_types.offset_of(path) for name, path in FIELDS.items()}
        functions = entries(view, reasons=reasons)
        text = program(view, fields, _SOURCE.read_text(), reasons=reasons)
        programs = compiled(text, [entry.function for entry in functions])
        self._make_maps(programs)
        for entry in reversed(functions):  # what ends a packet's way first: nothing begins that is not seen to end
            self._attach(entry, programs)
        if self._ring:
            self.poll(0)
            self.events.clear()  # of packets that not all points could show

    def _make_maps(self, programs: Programs) -> None:
        tables = {"wanted": self.targets.places, "reached": self.targets.backends}
        for name, spec in programs.maps.items():
            size = max(1, len(tables[name])) if name in tables else spec.entries
            made = Map.made(spec.kind, name, spec.key_size, spec.value_size, size)
            self._stack.callback(made.close)
            self._maps[name] = made
            for place, number in tables.get(name, {}).items():
                made.update(_PLACE.pack(*place), _NUMBER.pack(number))
        client = self.plan.client
        settings = _SETTINGS.pack(client or bytes(16), client is not None, self.plan.home)
        self._maps["settings"].update(bytes(4), settings)
        if "events" in self._maps:
            self._ring = Ring(self._maps["events"], lambda record: self.events.append(_event(record)))
            self._stack.callback(self._ring.close)

    def _attach(self, entry: Entry, programs: Programs) -> None:
        descriptors = {name: known.fd for name, known in self._maps.items()}
        try:
            loaded = _loaded(entry.function, programs.code[entry.function].linked(descriptors))
            self._stack.callback(os.close, loaded)
            link = library().bpf_raw_tracepoint_open(entry.tracepoint.encode(), loaded)
            self._stack.callback(os.close, check(link, f"attaching to tracepoint {entry.tracepoint}"))
        except BpfError as error:
            if entry.needed:
                raise ControllerError(f"this kernel does not let us observe {entry.tracepoint}: {error}") from error
            self.missing[entry.tracepoint] = str(error)

    def poll(self, seconds: float) -> None:
        """Reads events, or waits for some."""
        assert self._ring is not None
        self._ring.poll(seconds)

    # What was counted

    def _items(self, name: str, key: struct.Struct, value: struct.Struct) -> Iterator[tuple[Any, Any]]:
        keys, values = self._maps[name].items(np.dtype(f"V{key.size}"), np.dtype(f"V{value.size}"))
        for one, other in zip(keys, values, strict=True):
            yield key.unpack(one.tobytes()), value.unpack(other.tobytes())

    def counts(self, name: str) -> dict[tuple[Any, ...], int]:
        """Returns what one of _KEYS has counted, as the functions of `rows` take it."""
        return {key: count for key, (count,) in self._items(name, _KEYS[name], _COUNT)}

    def sums(self) -> dict[tuple[Any, ...], tuple[int, int]]:
        """Returns the sums that `rows.answer_rows` takes."""
        return {key[:5]: value for key, value in self._items("answer_sums", _ANSWER, _SUM)}

    def waiting(self) -> list[tuple[int, str, str]]:
        """Returns the connections without an answer: service, client, and what it asked for or was led to."""
        rows = chain(self._items("waits", _ENDS, _WAITING), self._items("connecting", _COUNT, _WAITING))
        waits = [row for key, row in rows if not any(key[2:4])]  # those with ports are the same ones as they left
        return [(row[6], place_text(row[1], row[3]), place_text(row[2], row[4])) for row in waits]


def _loaded(name: str, instructions: bytes) -> int:
    """Loads a program for a tracepoint that is in no object file, and returns its descriptor.

    Raises:
        BpfError: the kernel refuses it; has the end of the verifier's log.
    """
    log = ffi.new("char[]", LOG_SIZE)
    options = ffi.new("struct bpf_prog_load_opts *", {"sz": ffi.sizeof("struct bpf_prog_load_opts")})
    options.log_buf, options.log_size = log, LOG_SIZE
    code = library().bpf_prog_load(
        _RAW_TRACEPOINT, name.encode()[:15], b"GPL", ffi.from_buffer(instructions), len(instructions) // 8, options
    )
    return check(code, f"loading program {name}", "" if code >= 0 else ffi.string(log).decode()[-2000:].strip())


def _event(record: bytes) -> Event:
    ns, skb, source, destination, source_port, destination_port, protocol, *rest = _EVENT.unpack_from(record)
    point, netns, began, way, service, sequence, flags, length, more, device = rest
    return Event(
        ns, skb, point, netns, began, device.rstrip(b"\0").decode(errors="replace"), way, service,
        place_text(source, source_port), place_text(destination, destination_port),
        protocol, sequence, flags, length, more,
    )  # fmt: skip


def symbol(address: int) -> str:
    """Returns the name of the kernel's function at an address, of which the upper 16 bits may be missing."""
    whole = address | 0xFFFF << 48 if address >> 47 & 1 else address
    addresses, names = _symbols()
    place = bisect_right(addresses, whole) - 1
    return names[place] if place >= 0 else hex(whole)


@cache
def _symbols() -> tuple[list[int], list[str]]:
    rows = (line.split() for line in _SYMBOLS.read_text().splitlines())
    known = sorted((int(row[0], 16), row[2]) for row in rows if row[1] in "tTwW")
    return [address for address, _ in known], [name for _, name in known]
