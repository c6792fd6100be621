"""Loads programs in generations: all programs of one generation use the same maps."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map, Object, has_helper, program_number, refusal
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import abi
from hybrid_proxy.dataplane.modes.ebpf.maps.making import Larger, share, traffic_cpus
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import FLOWS
from hybrid_proxy.dataplane.timings import START

log = logging.getLogger(__name__)

NICE = 5  # a quarter of a busy processor's time is left: an agent that serves waits for it
DATAPATHS = {4: "datapath4", 6: "datapath6"}  # by family; in upper case, enum datapath of bpf/abi.h
CHECK_MTU = 163  # BPF_FUNC_check_mtu, linux/bpf.h (Linux 5.12)


@dataclass(slots=True)
class Programs:
    """The programs of one generation. None: this kernel refuses them, or they are not needed.

    The programs at tc hooks are small. They call the datapaths through the map `datapaths`, which all generations
    share: a program that is put there gets all packets from then on.
    """

    hooks: Object
    datapaths: dict[int, Object]  # by family
    connect: Object | None = None
    sockops: Object | None = None
    xdp: Object | None = None

    def __iter__(self) -> Iterator[Object]:
        loaded = (self.hooks, *self.datapaths.values(), self.connect, self.sockops, self.xdp)
        return (one for one in loaded if one is not None)

    def close(self) -> None:
        for loaded in self:
            loaded.close()


class Loader:
    """Loads objects on a set of maps, which follows those in use."""

    def __init__(self, maps: dict[str, Map], options: Options, hz: int) -> None:
        self.maps, self._options, self.hz = maps, options, hz
        self._hurried = threading.Event()

    def _settings(self, larger: Larger | None, *, can_set_errno: bool, quiet: bool) -> bytes:
        options, maps = self._options, {**self.maps, **(larger or {})}
        first, last = options.ebpf.masquerade_ports
        return abi.pack(
            "settings",
            hz=self.hz,
            reject_burst=options.ebpf.reject_rate,
            can_set_errno=int(can_set_errno),
            # A quarter of the ports of a backend's masqueraded clients: forged SYNs do not use them up.
            max_half_open=min((last - first + 1) // 4, *(maps[name].entries // 8 for name in FLOWS)),
            udp_timeout=options.timeouts.udp * self.hz,
            udp_timeout_stream=options.timeouts.udp_stream * self.hz,
            port_first=first,
            dsr=int(options.ebpf.dsr == "ipip"),
            port_count=last - first + 1,
            answer_ping=int(options.ebpf.answer_ping),
            can_check_mtu=int(has_helper(CHECK_MTU)),
            traffic_cpus=0 if quiet else traffic_cpus(options),
            event_burst=0 if quiet else options.ebpf.event_rate,
        )

    def one(
        self,
        name: str,
        larger: Larger | None = None,
        *,
        only: str = "",
        can_set_errno: bool = True,
        quiet: bool = False,
    ) -> Object:
        """Loads the object `NAME.bpf.o` on the maps of the set, or on `larger` ones in place of some.

        With `only` it is loaded with this one of its programs. With `quiet` it counts nothing and emits no events.
        `can_set_errno`: the kernel has bpf_set_retval.
        """
        loaded = Object(abi.OBJECTS / f"{name}.bpf.o")
        try:
            self.prepare(loaded, larger, can_set_errno=can_set_errno, quiet=quiet)
            for other in loaded.program_names if only else ():
                if other != only:
                    loaded.leave_out(other)
            with START.part(f"verifier: {only or name}"):
                loaded.load()
        except BpfError:
            loaded.close()
            raise
        return loaded

    def prepare(self, opened: Object, larger: Larger | None, *, can_set_errno: bool, quiet: bool) -> None:
        """Configure an open object as `one` loads it."""
        opened.constants(self._settings(larger, can_set_errno=can_set_errno, quiet=quiet))
        share(opened, {**self.maps, **(larger or {})})

    def hurry(self) -> None:
        """Has all processors load from now on: the caller has nothing to do until then."""
        self._hurried.set()

    def generation(self, larger: Larger | None = None, *, xdp: bool = False) -> Programs:
        """Loads all programs of a generation, those for drivers if `xdp`.

        May be called by another thread than that of the maps' owner.

        Raises:
            BpfError: the kernel refuses programs without which there is no service.
        """
        # The verifier takes a third of a second, so all objects are loaded at once; until somebody waits for them, one
        # processor is left to the rest of this program. Where another mode serves meanwhile, they are loaded one after
        # another behind all other work: connections that begin there would wait for a processor.
        names = ("hooks", *["xdp"] * xdp)
        waits = self._options.all_or_nothing
        free = threading.Semaphore(max(1, len(os.sched_getaffinity(0)) - 1))

        def begin() -> None:
            if not free.acquire(blocking=False):
                self._hurried.wait()

        with ThreadPoolExecutor(1 if waits else 4, "load", _give_way if waits else begin) as threads:
            # What takes longest comes first.
            datapaths = {
                family: threads.submit(self.one, "tc_datapath", larger, only=DATAPATHS[family]) for family in (6, 4)
            }
            sockets = threads.submit(self._sockets, larger)
            loading = {name: threads.submit(self.one, name, larger) for name in names}
            wait([*datapaths.values(), *loading.values()])
            self._hurried.set()
        try:
            loaded = {name: known.result() for name, known in loading.items()}
            carrying = {family: known.result() for family, known in datapaths.items()}
        except BpfError:
            for known in (*loading.values(), *datapaths.values()):
                if known.exception() is None:
                    known.result().close()
            for programs in sockets.result().values():
                programs.close()
            raise
        return Programs(datapaths=carrying, **loaded, **sockets.result())

    def _sockets(self, larger: Larger | None) -> dict[str, Object]:
        """Loads the cgroup programs; without bpf_set_retval (Linux 5.18) they reject nothing.

        Where failing backends are ejected, the sock_ops program comes with them. It observes connections of the node
        that get no answer.
        """
        loaded: dict[str, Object] = {}
        if self._options.ebpf.socket_scope == "off":
            return loaded
        for can_set_errno in (True, False):
            try:
                loaded["connect"] = self.one("connect", larger, can_set_errno=can_set_errno)
                break
            except BpfError as error:
                way = "" if can_set_errno else " without bpf_set_retval"
                log.warning("socket programs%s: %s", way, refusal("them", error))
        if "connect" in loaded and self._options.ebpf.failover.failures:
            try:
                loaded["sockops"] = self.one("sockops", larger)
            except BpfError as error:
                log.warning("silent backends are not noticed by what the node's own sockets meet: %s", error)
        return loaded


def _give_way() -> None:
    """Lowers the priority of the calling thread alone, not of its process."""
    with contextlib.suppress(OSError):  # forbidden by a profile of the runtime
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def put_datapaths(datapaths: Map, programs: Mapping[int, Object]) -> None:
    """Has hooks call these datapaths."""
    for family, loaded in programs.items():
        datapaths.update(_place(family), loaded.program(DATAPATHS[family]).to_bytes(4, sys.byteorder))


def missing_datapaths(datapaths: Map, programs: Mapping[int, Object]) -> Iterator[str]:
    """Yields a message for each datapath that another program replaced."""
    for family, loaded in programs.items():
        found, name = datapaths.lookup(_place(family)), DATAPATHS[family]
        if found is None or int.from_bytes(found, sys.byteorder) != program_number(loaded.program(name)):
            yield f"{name} is not what hooks call"


def _place(family: int) -> bytes:
    return abi.abi_constants()[DATAPATHS[family].upper()].to_bytes(4, sys.byteorder)
