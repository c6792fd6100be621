"""IPVS: virtual servers and their real servers, by generic netlink messages of our own.

pyroute2's IPVS class sends one message for each call (0.7 ms), defaults to direct routing and sends a deletion for
`update`; here any number of changes goes in one system call. Numbers are those of linux/ip_vs.h.
What the kernel refuses is a `NetlinkFailed`.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import genetlink
from hybrid_proxy.dataplane.kernel import netlink as nl
from hybrid_proxy.dataplane.kernel.tools import output
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Connection, Destination, Load, Server, Timeouts, Verb

MODPROBE_SECONDS: Final = 30
CONNECTIONS: Final = Path("/proc/thread-self/net/ip_vs_conn")
_PROTOCOLS: Final = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP, "SCTP": socket.IPPROTO_SCTP}
PERSISTENT, HASHED = 0x1, 0x2  # IP_VS_SVC_F_*; the second is the kernel's own mark
_FAMILY: Final = {socket.AF_INET: 4, socket.AF_INET6: 6}
_GET_SERVICE, _GET_DEST, _SET_CONFIG = 4, 8, 12
_ATTR_SERVICE, _ATTR_DEST = 1, 2
_TIMEOUTS: Final = (4, 5, 6)  # TCP, TCP after FIN, UDP
_AF_ATTR, _PROTOCOL, _ADDR, _PORT, _MARK, _SCHEDULER, _FLAGS, _TIMEOUT, _NETMASK = range(1, 10)
_D_ADDR, _D_PORT, _D_METHOD, _D_WEIGHT, _D_UPPER, _D_LOWER, _D_ACTIVE, _D_INACTIVE, _D_PERSIST = range(1, 10)
_D_FAMILY: Final = 11
_MASQUERADE: Final = 0  # IP_VS_CONN_F_MASQ: the destination is rewritten
_U16, _U32, _BE16, _PAIR = struct.Struct("=H"), struct.Struct("=I"), struct.Struct(">H"), struct.Struct("=II")
_OTHER: Final = {Verb.NEW_SERVER: Verb.SET_SERVER, Verb.NEW_DESTINATION: Verb.SET_DESTINATION}
_GONE: Final = {
    (Verb.DELETE_SERVER, errno.ESRCH), (Verb.DELETE_DESTINATION, errno.ESRCH),
    (Verb.DELETE_DESTINATION, errno.ENOENT),
}  # fmt: skip


def load_module(name: str) -> str | None:
    """Run `modprobe`. Returns None, or why it failed. A kernel without modules may have it built in."""
    try:
        output("modprobe", "-q", name, seconds=MODPROBE_SECONDS)
    except OSError as error:
        return str(error)
    return None


def translated_at_sockets(server: Server) -> bool:
    """True if programs give a socket of this node a backend before its packets are routed. Sends nothing.

    Otherwise a bound address is the source of whatever the node sends there.
    """
    with socket.socket(nl.AF[server.family], socket.SOCK_DGRAM) as tried:
        try:
            tried.connect((server.address, server.port))
        except ConnectionRefusedError:  # by a program: nothing else refuses a datagram socket
            return True
        except OSError:
            return False
        return bool(tried.getsockname()[0] != server.address)


def connections() -> Iterator[Connection]:
    """Returns the flows that IPVS knows in the calling thread's network namespace; a client's affinity is none.

    Netlink does not list them. While flows end, the kernel may leave out others in one reading.

    Raises:
        OSError: the list cannot be read.
    """
    try:
        file = CONNECTIONS.open(encoding="ascii")
    except FileNotFoundError:
        return  # the module is not loaded
    with file:
        next(file, None)  # the heads of the columns
        for line in file:
            name, client, client_port, address, port, backend, backend_port, state = line.split(maxsplit=8)[:8]
            if (protocol := _PROTOCOLS.get(name)) is not None and client_port != "0000":
                ends = (client, client_port, address, port, backend, backend_port)
                packed = [bytes.fromhex(text.replace(":", "")) for text in ends]
                yield Connection._make((6 if ":" in client else 4, protocol, *packed, state))


class Ipvs:
    """IPVS of the network namespace that the calling thread is in now.

    Raises:
        Unsupported: the kernel has no IPVS; the message says what to do.
    """

    def __init__(self) -> None:
        self._netlink = nl.Netlink(nl.GENERIC)
        self._kind = genetlink.family(self._netlink, "IPVS")
        if self._kind is None:
            why = load_module("ip_vs")
            self._kind = genetlink.family(self._netlink, "IPVS")
        if self._kind is None:
            self._netlink.close()
            raise Unsupported("IPVS", f"the kernel has no ip_vs ({why}); load or build that module")

    def close(self) -> None:
        self._netlink.close()

    def change(self, changes: Sequence[Change]) -> None:
        """Carry out all of these in their order. Existing objects are set, missing ones are ignored.

        Raises:
            NetlinkFailed: the kernel refused one; those before and after it are done.
        """
        again: list[Change] = []
        refused: tuple[Change, int] | None = None
        for position, code in self._netlink.send([self._message(each) for each in changes]):
            each = changes[position]
            if code == errno.EEXIST and each.verb in _OTHER:
                again.append(each._replace(verb=_OTHER[each.verb]))
            elif (each.verb, code) not in _GONE:
                refused = refused or (each, code)
        for position, code in self._netlink.send([self._message(each) for each in again]):
            refused = refused or (again[position], code)
        if refused is not None:
            raise nl.NetlinkFailed(_describe(refused[0]), refused[1])

    def servers(self) -> dict[Server, Config]:
        """Returns all virtual servers of this namespace, own and foreign."""
        found = {}
        for answer in self._netlink.dump(self._request(_GET_SERVICE, b"", nl.NLM_F_DUMP, "reading virtual servers")):
            server, config = _read_server(genetlink.fields(answer)[_ATTR_SERVICE])
            found[server] = config
        return found

    def destinations(self, server: Server) -> dict[Destination, Load]:
        """Returns the real servers of a virtual server; none when there is no such virtual server."""
        what = f"reading the real servers of {_text(server)}"
        found = {}
        for answer in self._netlink.dump(
            self._request(_GET_DEST, nl.nested(_ATTR_SERVICE, _name(server)), nl.NLM_F_DUMP, what)
        ):
            known, family = dict(nl.attributes(genetlink.fields(answer)[_ATTR_DEST])), server.family
            if _D_FAMILY in known:
                family = _FAMILY[socket.AddressFamily(_U16.unpack(known[_D_FAMILY])[0])]
            destination = Destination(_address(known[_D_ADDR], family), _BE16.unpack(known[_D_PORT])[0])
            counts = (_U32.unpack(known[kind])[0] for kind in (_D_WEIGHT, _D_ACTIVE, _D_INACTIVE))
            found[destination] = Load(*counts)
        return found

    def set_timeouts(self, wanted: Timeouts) -> None:
        """Set those that are not 0."""
        pairs = [(kind, value) for kind, value in zip(_TIMEOUTS, wanted, strict=True) if value]
        if not pairs:
            return
        body = b"".join(nl.attribute(kind, _U32.pack(value)) for kind, value in pairs)
        self._netlink.change([self._request(_SET_CONFIG, body, what=f"setting timeouts of IPVS to {wanted}")])

    def schedules(self, scheduler: str, family: int = 4) -> bool:
        """True if a scheduler can be used; creates a virtual server that no client uses (as kube-proxy's probe).

        Raises:
            NetlinkFailed: IPVS cannot be used at all, for example without privilege.
        """
        probe = Server(family, socket.IPPROTO_TCP, {4: "198.51.100.0", 6: "2001:db8::"}[family], 20000)
        made = Change(Verb.NEW_SERVER, probe, Config(scheduler))
        try:
            self.change([made])
        except nl.NetlinkFailed as error:
            if error.code == errno.ENOENT:
                return False
            raise
        self.change([made._replace(verb=Verb.DELETE_SERVER)])
        return True

    def _request(self, command: int, body: bytes, flags: int = 0, what: str = "a change of IPVS") -> nl.Message:
        assert self._kind is not None
        return genetlink.request(self._kind, command, body, flags, what)

    def _message(self, change: Change) -> nl.Message:
        server = _name(change.server)
        if change.config is not None:
            server += _settings(change.server.family, change.config)
        body = nl.nested(_ATTR_SERVICE, server)
        if change.destination is not None:
            body += nl.nested(_ATTR_DEST, _destination(change.server.family, change))
        return self._request(change.verb, body)


def _name(server: Server) -> bytes:
    family = nl.attribute(_AF_ATTR, _U16.pack(nl.AF[server.family]))
    if server.mark:
        return family + nl.attribute(_MARK, _U32.pack(server.mark))
    return b"".join(
        (
            family,
            nl.attribute(_PROTOCOL, _U16.pack(server.protocol)),
            nl.attribute(_ADDR, socket.inet_pton(nl.AF[server.family], server.address).ljust(16, b"\0")),
            nl.attribute(_PORT, _BE16.pack(server.port)),
        )
    )


def _settings(family: int, config: Config) -> bytes:
    flags = config.flags | (PERSISTENT if config.persistent else 0)
    netmask = b"\xff" * 4 if family == 4 else _U32.pack(128)  # of a client: every address is one of its own
    return b"".join(
        (
            nl.string(_SCHEDULER, config.scheduler),
            nl.attribute(_FLAGS, _PAIR.pack(flags, 0xFFFFFFFF)),
            nl.attribute(_TIMEOUT, _U32.pack(config.persistent)),
            nl.attribute(_NETMASK, netmask),
        )
    )


def _destination(family: int, change: Change) -> bytes:
    assert change.destination is not None
    address, port = change.destination
    name = nl.attribute(_D_FAMILY, _U16.pack(nl.AF[family]))
    name += nl.attribute(_D_ADDR, socket.inet_pton(nl.AF[family], address).ljust(16, b"\0"))
    name += nl.attribute(_D_PORT, _BE16.pack(port))
    if change.verb is Verb.DELETE_DESTINATION:
        return name
    settings = ((_D_METHOD, _MASQUERADE), (_D_WEIGHT, change.weight), (_D_UPPER, 0), (_D_LOWER, 0))
    return name + b"".join(nl.attribute(kind, _U32.pack(value)) for kind, value in settings)


def _read_server(data: bytes) -> tuple[Server, Config]:
    known = dict(nl.attributes(data))
    family = _FAMILY[socket.AddressFamily(_U16.unpack(known[_AF_ATTR])[0])]
    flags = _PAIR.unpack(known[_FLAGS])[0]
    persistent = _U32.unpack(known[_TIMEOUT])[0] if flags & PERSISTENT else 0
    config = Config(known[_SCHEDULER].partition(b"\0")[0].decode(), persistent, flags & ~(PERSISTENT | HASHED))
    if _MARK in known:
        return Server(family, mark=_U32.unpack(known[_MARK])[0]), config
    address = _address(known[_ADDR], family)
    return Server(family, _U16.unpack(known[_PROTOCOL])[0], address, _BE16.unpack(known[_PORT])[0]), config


def _address(packed: bytes, family: int) -> str:
    return socket.inet_ntop(nl.AF[family], packed[: 4 if family == 4 else 16])


def _text(server: Server) -> str:
    return f"mark {server.mark:#x}" if server.mark else f"{server.address} port {server.port}"


def _describe(change: Change) -> str:
    verb = change.verb.name.lower().replace("_", " ")
    about: Iterable[object] = filter(None, (change.config and change.config.scheduler, change.destination))
    return f"{verb} at {_text(change.server)} ({', '.join(str(each) for each in about)})"
