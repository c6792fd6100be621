"""What C and Python believe of each other: BTF of the compiled objects, hashes, enumerators."""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
import subprocess
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_proxy.dataplane.balancing import Spread
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.services import lower
from hybrid_proxy.dataplane.table import Masquerade, Protocol
from tests.properties import examples

from .kit import NETS, PASS, Bench, datagram, frame, read, service, syn

FIXED_ROWS = {"frontend4_key": 8, "frontend6_key": 20, "service": 32, "backend": 32, "flow4_key": 16, "flow6_key": 40}
STRUCTS = [
    "frontend4_key", "frontend6_key", "service", "backend", "flow4_key", "flow6_key", "flow", "affinity_key", "node",
    "settings", "explanation", "note", "slot", "timewait_bucket", "source_range4_key", "source_range6_key",
    "own_address", "interface_address", "equal_path", "equal_route", "traffic", "failures", "first_packets",
    "load", "bitmaps",
]  # fmt: skip
SOCKET_STRUCTS = ["socket_peer", "socket_state", "host_netns"]
CARRY_STRUCTS = ["flow_key_places", "carrying"]
COMMON = settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@cache
def btf(name: str) -> list[dict[str, Any]]:
    if shutil.which("bpftool") is None:
        pytest.skip("needs bpftool (Debian: apt-get install bpftool)")
    command = ["bpftool", "btf", "dump", "file", str(layout.OBJECTS / name), "format", "raw", "-j"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["types"]


def resolve(types: list[dict[str, Any]], number: int) -> dict[str, Any]:
    kind = types[number - 1]
    while kind["kind"] in ("TYPEDEF", "CONST", "VOLATILE"):
        kind = types[kind["type_id"] - 1]
    return kind


def size_of(types: list[dict[str, Any]], number: int) -> int:
    kind = resolve(types, number)
    if kind["kind"] == "ARRAY":
        return kind["nr_elems"] * size_of(types, kind["type_id"])
    return 8 if kind["kind"] == "PTR" else kind["size"]


def compiled_structs(objects: str) -> dict[str, tuple[int, dict[str, tuple[int, int]]]]:
    """Size and {field: (offset, size)} of each struct."""
    types = btf(objects)
    return {kind["name"]: (kind["size"], fields_of(types, kind)) for kind in types if kind["kind"] == "STRUCT"}


def fields_of(types: list[dict[str, Any]], kind: dict[str, Any], start: int = 0) -> dict[str, tuple[int, int]]:
    """Offset and size by name; an anonymous union has the name of its first member."""
    found: dict[str, tuple[int, int]] = {}
    for member in kind["members"][: 1 if kind["kind"] == "UNION" else None]:
        place, inner = start + member["bits_offset"] // 8, resolve(types, member["type_id"])
        if member["name"] == "(anon)" and inner["kind"] in ("STRUCT", "UNION"):
            found |= fields_of(types, inner, place)
        else:
            found[member["name"]] = (place, size_of(types, member["type_id"]))
    return found


def check_struct(objects: list[str], name: str) -> None:
    compiled = [known[name] for known in map(compiled_structs, objects) if name in known]
    assert compiled, f"no object knows struct {name}"
    ours = layout.dtype_of(name)
    fields = {field: (ours.fields[field][1], ours.fields[field][0].itemsize) for field in ours.names or ()}
    for size, members in compiled:
        assert ours.itemsize == size
        assert fields == members


@pytest.mark.parametrize("name", STRUCTS)
def test_rows_are_laid_out_as_compiled(name: str) -> None:
    check_struct(["tc_datapath.bpf.o", "inspect.bpf.o", "explain.bpf.o"], name)
    assert layout.dtype_of(name).itemsize == FIXED_ROWS.get(name, layout.dtype_of(name).itemsize)


@pytest.mark.parametrize("name", SOCKET_STRUCTS)
def test_rows_of_sockets_are_laid_out_as_compiled(name: str) -> None:
    check_struct(["connect.bpf.o"], name)


@pytest.mark.parametrize("name", CARRY_STRUCTS)
def test_rows_of_carrying_are_laid_out_as_compiled(name: str) -> None:
    check_struct(["carry.bpf.o"], name)


@pytest.mark.parametrize("name", ["service", "backend", "slot", "node"])
def test_rows_of_mapped_arrays_have_no_hidden_padding(name: str) -> None:
    """The kernel rounds elements of an array up to 8 bytes; a view strides by the row's own size."""
    assert layout.dtype_of(name).itemsize % 8 == 0


def test_no_row_is_forgotten_here() -> None:
    unknown_to_btf = {"sweep", "event"}  # of packets and the ring buffer
    declared = {*STRUCTS, *SOCKET_STRUCTS, *CARRY_STRUCTS, *unknown_to_btf}
    header = (layout.OBJECTS / "abi.h").read_text()
    assert {line.split()[1] for line in header.splitlines() if line.startswith("struct ") and "{" in line} == declared


# What lower.py writes as numbers, because it imports nothing.
CONSTANTS = [
    ("FRONTEND_INTERNAL_SET", lower.FRONTEND_INTERNAL_SET),
    ("FRONTEND_EXTERNAL_SET", lower.FRONTEND_EXTERNAL_SET),
    ("FRONTEND_ADDRESS", lower.FRONTEND_ADDRESS),
    ("FRONTEND_MASQUERADE_POD", lower.FRONTEND_MASQUERADE[Masquerade.POD]),
    ("FRONTEND_MASQUERADE_NODE", lower.FRONTEND_MASQUERADE[Masquerade.NODE]),
    ("FRONTEND_MASQUERADE_EXTERNAL", lower.FRONTEND_MASQUERADE[Masquerade.EXTERNAL]),
    ("FRONTEND_SOURCE_RANGES", lower.FRONTEND_SOURCE_RANGES),
    ("FRONTEND_NODE_PORTS", lower.FRONTEND_NODE_PORTS),
    ("SERVICE_DROP_SET0", lower.SERVICE_DROP_SET[0]),
    ("SERVICE_DROP_SET1", lower.SERVICE_DROP_SET[1]),
    ("SERVICE_BY_TUPLE", lower.SERVICE_SPREAD[Spread.TUPLE]),
    ("SERVICE_BY_CLIENT", lower.SERVICE_SPREAD[Spread.CLIENT]),
    ("SERVICE_ROUND_ROBIN", lower.SERVICE_SPREAD[Spread.IN_TURN]),
    ("BACKEND_SERVING", lower.BACKEND_SERVING),
    ("BACKEND_SET0", lower.BACKEND_SET[0]),
    ("BACKEND_SET1", lower.BACKEND_SET[1]),
    ("BACKEND_EJECTED", lower.BACKEND_EJECTED),
    ("BACKEND_PROBE_FAILED", lower.BACKEND_PROBE_FAILED),
    ("BACKEND_LOCAL", lower.BACKEND_LOCAL),
    ("BACKEND_SETS", lower.BACKEND_SETS),
]


@pytest.mark.parametrize(("name", "value"), CONSTANTS, ids=[name for name, _ in CONSTANTS])
def test_the_pure_translation_has_the_headers_numbers(name: str, value: int) -> None:
    assert layout.abi_constants()[name] == value


def test_array_lengths_are_their_limits() -> None:
    limits = layout.abi_constants()
    assert layout.dtype_of("service")["sets"].shape == (limits["BACKEND_SETS"],)
    assert layout.dtype_of("sweep")["keys"].shape == (limits["SWEEP_KEYS"],)
    assert layout.dtype_of("node")["cidr4"].shape == (limits["SERVICE_CIDRS"],)
    assert limits["RANGE_OFFSET_BITS"] + limits["RANGE_COUNT_BITS"] + limits["RANGE_EPOCH_BITS"] == 64


@given(st.integers(0, 2**28 - 1), st.integers(0, 2**18 - 1), st.integers(0, 2**40))
def test_range_words_are_read_as_written(offset: int, count: int, epoch: int) -> None:
    word = layout.range_word(offset, count, epoch)
    assert word < 2**64
    assert layout.split_range_word(word) == (offset, count, epoch % 2**18)


# The unspecified address stands for every one that serves node ports.
ADDRESSES = {v: st.ip_addresses(v=v).filter(lambda a: int(a) != 0) for v in (4, 6)}


def may_ask(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it may be a client's."""
    if address.is_multicast or address.is_loopback or str(address) == "255.255.255.255":
        return False
    return address.version == 4 or address.ipv4_mapped is None


CLIENTS = {v: ADDRESSES[v].filter(may_ask) for v in (4, 6)}


@pytest.mark.parametrize("family", [4, 6], ids=["v4", "v6"])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
@COMMON
@given(st.data())
def test_any_programmed_frontend_is_found(bench: Bench, family: int, protocol: Protocol, data: st.DataObject) -> None:
    """Prefilter, key, tag and the backend's own prefilter agree for any address and port, there and back."""
    vip, client, backend = (str(data.draw(known[family])) for known in (ADDRESSES, CLIENTS, ADDRESSES))
    if client in (backend, vip) or ipaddress.ip_address(vip) == ipaddress.ip_address(backend):
        return
    port, target = data.draw(st.integers(1, 65535)), data.draw(st.integers(1, 65535))
    bench.forget()
    bench.serve(service(vip, port, [(backend, target)], protocol=protocol))
    transport = syn(40000, port) if protocol is Protocol.TCP else datagram(40000, port)
    verdict, out = bench.ingress(frame(NETS[family], client, vip, transport))
    assert (verdict, read(out).tuple) == (PASS, (client, 40000, backend, target))
    flags = syn(target, 40000)
    flags.flags = "SA"
    answer = flags if protocol is Protocol.TCP else datagram(target, 40000)
    verdict, out = bench.egress(frame(NETS[family], backend, client, answer))
    assert (verdict, read(out).tuple) == (PASS, (vip, port, client, 40000))
    tables = [flow_arrays(bench.maps.maps[f"{table}{family}"], family) for table in ("flows", "half_open")]
    keys, values = (np.concatenate(columns) for columns in zip(*tables, strict=True))
    assert len(keys) == 2
    assert layout.flow_tags(keys, family).tolist() == values["tag"].tolist()


@pytest.mark.parametrize("family", [4, 6], ids=["v4", "v6"])
@given(st.data())
def test_hashing_many_is_hashing_each(family: int, data: st.DataObject) -> None:
    """Rows with numpy, and one without."""
    drawn = st.tuples(st.ip_addresses(v=family), st.integers(0, 65535), st.sampled_from([0, 6, 17, 132]))
    rows = data.draw(st.lists(drawn, min_size=1, max_size=20))
    words = layout.address_words(str(address) for address, _, _ in rows)
    ports = layout.swap16([port for _, port, _ in rows])
    together = layout.backend_bits(words, ports, np.array([protocol for _, _, protocol in rows]), family)
    one_by_one = [
        layout.backend_bit(layout.words_of(str(address)), socket.htons(port), protocol, family)
        for address, port, protocol in rows
    ]
    assert together.tolist() == one_by_one
    assert together.max() < 1 << layout.abi_constants()["PREFILTER_BITS"]


@pytest.mark.parametrize("family", [4, 6], ids=["v4", "v6"])
def test_addresses_of_a_service_network_spread_over_the_prefilter(family: int) -> None:
    """10,000 adjacent addresses fall on nearly as many bits."""
    base = ipaddress.ip_address("10.96.0.0" if family == 4 else "fd00:96::")
    bits = layout.service_bits(layout.address_words(str(base + i) for i in range(10_000)), family)
    assert len(np.unique(bits)) > 9_900


@pytest.mark.parametrize("text", ["10.0.0.1", "255.255.255.255", "::", "::1", "fd00::1", "::ffff:1.2.3.4"])
def test_addresses_are_read_as_written(text: str) -> None:
    family = 6 if ":" in text else 4
    assert layout.address_text(layout.address_bytes(text), family) == text
    assert len(layout.address_bytes(text)) == 16
