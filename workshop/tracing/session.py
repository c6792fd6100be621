"""One measurement in the kernel: compiled, attached, read, and gone with its last descriptor."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.dataplane.kernel import btf
from hybrid_proxy.workshop.tracing import compiler
from hybrid_proxy.workshop.tracing.rows import Event
from hybrid_proxy.workshop.tracing.targets import Place, Targets
from hybrid_proxy.workshop.tracing.targets import place_text as _socket_text
from hybrid_proxy.workshop.tracing.text import FIELDS, Entry, Plan, View, entries, program

__all__ = ["Session", "has_reasons"]

_SOURCE: Final = Path(__file__).with_name("packets.c")
_EVENT: Final = struct.Struct("=QQ16s16sHHBxxx8IQ16s")  # struct event of packets.c


def has_reasons() -> bool:
    """Whether this kernel says why it drops a packet (Linux 5.17)."""
    return bool(btf.enum_names("skb_drop_reason"))


class Session:
    """Programs that count. A context manager: attached on entry, removed on exit.

    `missing` has, for each point that this kernel cannot show, the reason.

    Raises:
        ControllerError: bcc or headers are missing, or a point without which nothing can be shown.
    """

    def __init__(self, plan: Plan, targets: Targets) -> None:
        self.plan = plan
        self.targets = targets
        self.missing: dict[str, str] = {}
        self._records: list[bytes] = []
        self._stack = ExitStack()
        self._bpf: Any = None
        self._module: Any = None

    def __enter__(self) -> Self:
        with self._stack:
            self._open()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        self._module = compiler.load()
        fields = {name: btf.offset_of(path) for name, path in FIELDS.items()}
        self._bpf = compiler.compiled(program(self.plan, fields, _SOURCE.read_text()))
        self._stack.callback(self._bpf.cleanup)
        self._fill("wanted", self.targets.places)
        if self.plan.view is View.LATENCY:
            self._fill("reached", self.targets.backends)
        elif self.plan.view is View.FOLLOW:
            self._bpf["events"].open_ring_buffer(self._take)
        for entry in reversed(entries(self.plan)):  # what ends a way first: nothing begins that is not seen to end
            self._attach(entry)

    def _fill(self, name: str, places: Mapping[Place, int]) -> None:
        table = self._bpf[name]
        for place, number in places.items():
            key = table.Key()
            ctypes.memmove(key.address, place.address, 16)
            key.port, key.protocol = place.port, place.protocol
            table[key] = table.Leaf(number)

    def _attach(self, entry: Entry) -> None:
        with compiler.captured_stderr() as stderr:
            try:
                self._bpf.load_func(entry.function.encode(), self._module.BPF.RAW_TRACEPOINT)
                self._bpf.attach_raw_tracepoint(entry.tracepoint.encode(), entry.function.encode())
            except Exception as error:
                why = f"{error}\n{stderr()[-2000:]}".rstrip()
                if entry.needed:
                    raise ControllerError(f"this kernel does not let us look at {entry.tracepoint}: {why}") from error
                self.missing[entry.tracepoint] = why

    def _take(self, _: Any, data: Any, size: int) -> None:
        # An exception would be lost in bcc: it is called from C. What can fail is done by who asks.
        self._records.append(ctypes.string_at(data, size))

    def events(self) -> list[Event]:
        """The events so far, in the order in which they arrived."""
        return [_event(record) for record in self._records]

    @property
    def event_count(self) -> int:
        """How many events there are."""
        return len(self._records)

    def poll(self, seconds: float) -> None:
        """Take events that are there, or wait for some."""
        self._bpf.ring_buffer_poll(int(1000 * seconds))

    # What was counted

    def _items(self, name: str) -> Iterator[tuple[Any, Any]]:
        yield from self._bpf[name].items()

    def answers(
        self,
    ) -> tuple[
        dict[tuple[int, int, bytes, int, int, int], int], dict[tuple[int, int, bytes, int, int], tuple[int, int]]
    ]:
        """As `rows.answer_rows` takes it."""

        def backend(key: Any) -> tuple[int, int, bytes, int, int]:
            of = key.backend
            return key.service, key.what, bytes(of.address), of.port, of.protocol

        counts = {(*backend(key), key.slot): value.value for key, value in self._items("answers")}
        return counts, {backend(key): (value.ns, value.max) for key, value in self._items("answer_sums")}

    def drops(self) -> list[dict[str, Any]]:
        """service, way, reason, function (a name), to, protocol, count; the numbers as the kernel has them."""
        return [
            {
                "service": key.service, "way": key.way, "reason": key.reason,
                "function": self.symbol(key.location), "to": _socket_text(bytes(key.to.address), key.to.port),
                "protocol": key.to.protocol, "count": value.value,
            }
            for key, value in self._items("drops")
        ]  # fmt: skip

    def repeats(self) -> list[dict[str, Any]]:
        """service, way, backend (None: not known), count."""
        return [
            {
                "service": key.service, "way": key.way, "count": value.value,
                "backend": _socket_text(bytes(key.backend.address), key.backend.port)
                if any(key.backend.address) else None,
            }
            for key, value in self._items("repeats")
        ]  # fmt: skip

    def symbol(self, address: int) -> str:
        """The name of the kernel's function at an address, of which the upper bits may be missing."""
        whole = address | 0xFFFF << 48 if address >> 47 & 1 else address
        return str(self._module.BPF.ksym(whole).decode())


def _event(record: bytes) -> Event:
    ns, skb, source, destination, source_port, destination_port, protocol, *rest = _EVENT.unpack_from(record)
    point, netns, _, way, service, sequence, flags, length, more, device = rest
    return Event(
        ns, skb, point, netns, device.rstrip(b"\0").decode(errors="replace"), way, service,
        _socket_text(source, source_port), _socket_text(destination, destination_port),
        protocol, sequence, flags, length, more,
    )  # fmt: skip
