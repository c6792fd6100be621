"""Encodes operations as netlink messages, and decodes the kernel's answers."""

from __future__ import annotations

import contextlib
import errno
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from hybrid_proxy.dataplane.kernel.netlink import NLM_F_APPEND, NLM_F_CREATE, attribute, nested, parcels, string, text
from hybrid_proxy.dataplane.kernel.netlink import attributes as each_attribute
from hybrid_proxy.dataplane.kernel.nfnetlink import NFPROTO, Message, Nfnetlink, NftablesError, attributes, number
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables import schema
from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.nftables.codec import Codec, cidr_between
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Attributes, ChainName, Family, Rule, Verdict

ELEMENTS_ROOM: Final = 60_000  # bytes
NEEDS: Final = "Linux 5.10 or newer with nf_tables, NAT, numgen, fib, reject and conntrack"
VALUES_KEPT: Final = 1024  # encoded values, which elements in a row often share

# User data of rules and elements: type, length, bytes. nft skips the types that it does not know.
_COMMENT: Final = 0
_DIGEST: Final = 0xF0


class Kernel:
    """The kernel interface for one table of each family, in the calling thread's network namespace.

    `chain_named` turns the name of a chain into the target of a verdict.

    Raises:
        OSError: no nf_tables in this kernel.
    """

    def __init__(
        self, table: str, sets: Mapping[str, schema.Set] | None = None, chain_named: Callable[[str], ChainName] = str
    ) -> None:
        self._table = table
        self._sets = sets or {}
        self._chain_named = chain_named
        self._netlink = Nfnetlink()
        self._codecs = {version: Codec(family) for version, family in FAMILIES.items()}
        self._set_id = 0

    def close(self) -> None:
        self._netlink.close()

    def generation(self) -> int:
        """The kernel's generation number, which changes with every transaction of any program."""
        return self._netlink.generation()

    # Writing

    def commit(self, *work: op.Work) -> None:
        """Do everything as one transaction, of one family or both.

        Raises:
            NftablesError: the kernel refused it; nothing of it is in effect.
        """
        self._netlink.commit(
            [message for family, operations in work for one in operations for message in self._messages(family, one)]
        )

    def _messages(self, family: Family, operation: op.Operation) -> Iterator[Message]:
        table = string(nf.NFTA_TABLE_NAME, self._table)  # NFTA_CHAIN_TABLE and all the others have the same number

        def message(kind: int, flags: int, body: bytes, what: str) -> Message:
            return Message(kind, flags, NFPROTO[family.version], table + body, what)

        match operation:
            case op.AddTable():
                yield message(nf.NFT_MSG_NEWTABLE, NLM_F_CREATE, b"", f"table {family.name} {self._table}")
            case op.DeleteTable():
                yield message(nf.NFT_MSG_DELTABLE, 0, b"", f"to delete table {family.name} {self._table}")
            case op.DeleteRules():
                yield message(nf.NFT_MSG_DELRULE, 0, b"", f"to delete the rules of table {family.name} {self._table}")
            case op.AddCounter(name):
                kind = number(nf.NFTA_OBJ_TYPE, nf.NFT_OBJECT_COUNTER)
                body = string(nf.NFTA_OBJ_NAME, name) + kind + nested(nf.NFTA_OBJ_DATA)
                yield message(nf.NFT_MSG_NEWOBJ, NLM_F_CREATE, body, f"counter {name}")
            case op.AddSet(wanted):
                self._set_id += 1
                body = _set(family, wanted, self._set_id)
                yield message(nf.NFT_MSG_NEWSET, NLM_F_CREATE, body, f"set {wanted.name}")
            case op.FlushSet(name):
                body = string(nf.NFTA_SET_ELEM_LIST_SET, name)  # without a list these are all elements
                yield message(nf.NFT_MSG_DELSETELEM, 0, body, f"to flush set {name}")
            case op.DeleteSet(name):
                yield message(nf.NFT_MSG_DELSET, 0, string(nf.NFTA_SET_NAME, name), f"to delete set {name}")
            case op.AddChain(chain):
                yield message(nf.NFT_MSG_NEWCHAIN, NLM_F_CREATE, _chain(chain), f"chain {chain.name}")
            case op.FlushChain(name):
                yield message(nf.NFT_MSG_DELRULE, 0, string(nf.NFTA_RULE_CHAIN, name), f"to flush chain {name}")
            case op.DeleteChain(name):
                yield message(nf.NFT_MSG_DELCHAIN, 0, string(nf.NFTA_CHAIN_NAME, name), f"to delete chain {name}")
            case op.AddRules(chain, rules):
                for position, rule in enumerate(rules, 1):
                    what = f"rule {position} of chain {chain}"
                    yield message(nf.NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, _rule(chain, rule), what)
            case op.AddElements(name, elements):
                for body in _chunks(name, self._new_elements(family, name, elements)):
                    yield message(nf.NFT_MSG_NEWSETELEM, NLM_F_CREATE, body, f"elements of {name}")
            case op.DeleteElements(name, keys):
                encode = _key_encoder(self._codecs[family.version], self._sets[name])
                for body in _chunks(name, (nested(nf.NFTA_LIST_ELEM, encode(key)) for key in keys)):
                    yield message(nf.NFT_MSG_DELSETELEM, 0, body, f"to delete elements of {name}")

    def _new_elements(self, family: Family, name: str, elements: Sequence[schema.Element]) -> Iterator[bytes]:
        codec = self._codecs[family.version]
        encode = _key_encoder(codec, self._sets[name])
        values: dict[schema.Value, bytes] = {}
        for element in elements:
            parts = encode(element.key)
            value = element.value
            if value is not None:
                data = values.get(value)
                if data is None:
                    if len(values) > VALUES_KEPT:
                        values.clear()
                    data = values[value] = nested(nf.NFTA_SET_ELEM_DATA, _value(codec, value))
                parts += data
            if element.comment:
                text = element.comment.encode() + b"\0"
                parts += attribute(nf.NFTA_SET_ELEM_USERDATA, bytes([_COMMENT, len(text)]) + text)
            yield nested(nf.NFTA_LIST_ELEM, parts)

    # Reading

    def skeleton(self, family: Family) -> op.Skeleton | None:
        """Read the table without its elements; None: there is no such table."""
        protocol = NFPROTO[family.version]
        if self._netlink.get(nf.NFT_MSG_GETTABLE, protocol, string(nf.NFTA_TABLE_NAME, self._table)) is None:
            return None
        try:
            chains = dict(self._read_chains(protocol))
            return op.Skeleton(
                sets=dict(self._read_sets(protocol)),
                chains=self._read_rules(protocol, chains),
                hooks={name: hook for name, hook in chains.items() if hook is not None},
                counters=frozenset(self.counters(family)),
            )
        except NftablesError as error:
            if error.code == errno.ENOENT:
                return None
            raise

    def _read_sets(self, protocol: int) -> Iterator[tuple[str, schema.Shape]]:
        question = string(nf.NFTA_SET_TABLE, self._table)
        for body in self._netlink.dump(nf.NFT_MSG_GETSET, protocol, question):
            found = attributes(body)
            shape = schema.Shape(
                _integer(found.get(nf.NFTA_SET_FLAGS, b"")), _integer(found[nf.NFTA_SET_KEY_TYPE]),
                _integer(found[nf.NFTA_SET_KEY_LEN]), _integer(found.get(nf.NFTA_SET_DATA_TYPE, b"")),
                _integer(found.get(nf.NFTA_SET_TIMEOUT, b"")) // 1000,
            )  # fmt: skip
            yield text(found[nf.NFTA_SET_NAME]), shape

    def _read_chains(self, protocol: int) -> Iterator[tuple[str, schema.Hook | None]]:
        """Chains of the table; None: no base chain."""
        for body in self._netlink.dump(nf.NFT_MSG_GETCHAIN, protocol):
            found = attributes(body)
            if text(found[nf.NFTA_CHAIN_TABLE]) != self._table:
                continue
            hook = None
            if nf.NFTA_CHAIN_HOOK in found:
                place = attributes(found[nf.NFTA_CHAIN_HOOK])
                hook = schema.Hook(
                    _integer(place[nf.NFTA_HOOK_HOOKNUM]), _signed(place[nf.NFTA_HOOK_PRIORITY]),
                    text(found[nf.NFTA_CHAIN_TYPE]), _integer(found.get(nf.NFTA_CHAIN_POLICY, b"")),
                )  # fmt: skip
            yield text(found[nf.NFTA_CHAIN_NAME]), hook

    def _read_rules(self, protocol: int, chains: Iterable[str]) -> dict[str, tuple[str, ...]]:
        digests: dict[str, list[str]] = {name: [] for name in chains}
        question = string(nf.NFTA_RULE_TABLE, self._table)
        for body in self._netlink.dump(nf.NFT_MSG_GETRULE, protocol, question):
            found = attributes(body)
            if text(found[nf.NFTA_RULE_TABLE]) == self._table:
                digest = _user_data(found.get(nf.NFTA_RULE_USERDATA, b"")).get(_DIGEST, b"").decode()
                digests.setdefault(text(found[nf.NFTA_RULE_CHAIN]), []).append(digest)
        return {name: tuple(found) for name, found in digests.items()}

    def contents(self, family: Family, name: str) -> dict[schema.Key, tuple[schema.Value, str]]:
        """Read all elements of a set: key -> value and comment."""
        codec, wanted = self._codecs[family.version], self._sets[name]
        decode, value_of = codec.decoder(wanted.key), self._value_reader(codec, wanted)
        contents = {}
        question = string(nf.NFTA_SET_ELEM_LIST_TABLE, self._table) + string(nf.NFTA_SET_ELEM_LIST_SET, name)
        for message in self._netlink.dump(nf.NFT_MSG_GETSETELEM, NFPROTO[family.version], question):
            for _, element in each_attribute(attributes(message).get(nf.NFTA_SET_ELEM_LIST_ELEMENTS, b"")):
                found = attributes(element)
                key = decode(_only_value(found[nf.NFTA_SET_ELEM_KEY]))
                if nf.NFTA_SET_ELEM_KEY_END in found:
                    last = decode(_only_value(found[nf.NFTA_SET_ELEM_KEY_END]))[-1]
                    key = (*key[:-1], cidr_between(str(key[-1]), str(last)))
                value, comment = None, ""
                if nf.NFTA_SET_ELEM_DATA in found:
                    value = value_of(found[nf.NFTA_SET_ELEM_DATA])
                if nf.NFTA_SET_ELEM_USERDATA in found:
                    comment = text(_user_data(found[nf.NFTA_SET_ELEM_USERDATA]).get(_COMMENT, b""))
                contents[key] = (value, comment)
        return contents

    def _value_reader(self, codec: Codec, wanted: schema.Set) -> Callable[[bytes], schema.Value]:
        known: dict[bytes, schema.Value] = {}
        decode = codec.decoder(wanted.data)

        def read(data: bytes) -> schema.Value:
            found = known.get(data)
            if found is None:
                if wanted.data == (schema.VERDICT,):
                    found = self._verdict(attributes(attributes(data)[nf.NFTA_DATA_VERDICT]))
                else:
                    value = decode(_only_value(data))
                    found = int(value[0]) if len(value) == 1 else (str(value[0]), int(value[1]))
                known[data] = found
            return found

        return read

    def _verdict(self, found: dict[int, bytes]) -> Verdict:
        chain = found.get(nf.NFTA_VERDICT_CHAIN)
        return Verdict(_signed(found[nf.NFTA_VERDICT_CODE]), self._chain_named(text(chain)) if chain else "")

    def counters(self, family: Family) -> dict[str, int]:
        """Read the packets by counter."""
        counters = {}
        question = string(nf.NFTA_OBJ_TABLE, self._table) + number(nf.NFTA_OBJ_TYPE, nf.NFT_OBJECT_COUNTER)
        for body in self._netlink.dump(nf.NFT_MSG_GETOBJ, NFPROTO[family.version], question):
            found = attributes(body)
            is_counter = _integer(found[nf.NFTA_OBJ_TYPE]) == nf.NFT_OBJECT_COUNTER
            if is_counter and text(found[nf.NFTA_OBJ_TABLE]) == self._table:
                packets = attributes(found[nf.NFTA_OBJ_DATA]).get(nf.NFTA_COUNTER_PACKETS, b"")
                counters[text(found[nf.NFTA_OBJ_NAME])] = _integer(packets)
        return counters


def missing(table: str, sets: Mapping[str, schema.Set], work: Iterable[op.Work]) -> str | None:
    """Test whether the kernel accepts these operations in a temporary table of that name.

    Each family's operations are one transaction that deletes the table again: nothing of it ever takes effect.

    Returns what is missing on this node and what to do about it; None: nothing is.
    """
    try:
        with contextlib.closing(Kernel(table, sets)) as kernel:
            for family, operations in work:
                kernel.commit((family, [*operations, op.DeleteTable()]))
    except NftablesError as error:
        if error.code == errno.EPERM:
            return "nf_tables may not be changed: run as root (CAP_NET_ADMIN)"
        return f"{error} (needs {NEEDS})"
    except OSError as error:
        return f"this kernel has no nf_tables: {error}; load the module nf_tables"
    return None


def remove_tables(table: str) -> int:
    """Delete the table of that name in both families. Returns how many there were.

    Its rules are deleted first. The kernel applies the rules of a base chain that it deletes to some more packets, when
    maps are already empty and sets are not (Linux 6.4, `nft_map_deactivate`). A rule that refuses what is in no map
    would refuse a new connection that another mode translates.
    """
    removed = 0
    try:
        kernel = Kernel(table)
    except OSError:
        return 0  # without nf_tables there is no table
    with contextlib.closing(kernel):
        for family in FAMILIES.values():
            with contextlib.suppress(NftablesError):
                kernel.commit((family, [op.DeleteRules()]))
                kernel.commit((family, [op.DeleteTable()]))
                removed += 1
    return removed


# Encoding


def _attribute(kind: int, value: int | str | bytes | Attributes) -> bytes:
    if isinstance(value, int):
        return number(kind, value)
    if isinstance(value, str):
        return string(kind, value)
    if isinstance(value, bytes):
        return attribute(kind, value)
    return nested(kind, _attributes(value))


def _attributes(values: Attributes) -> bytes:
    return b"".join(_attribute(kind, value) for kind, value in values)


def _set(family: Family, wanted: schema.Set, set_id: int) -> bytes:
    shape = wanted.shape(family)
    parts = [
        string(nf.NFTA_SET_NAME, wanted.name), number(nf.NFTA_SET_FLAGS, shape.flags),
        number(nf.NFTA_SET_KEY_TYPE, shape.key_type), number(nf.NFTA_SET_KEY_LEN, shape.key_length),
        number(nf.NFTA_SET_ID, set_id),
    ]  # fmt: skip
    if wanted.data:
        parts.append(number(nf.NFTA_SET_DATA_TYPE, shape.data_type))
        parts.append(number(nf.NFTA_SET_DATA_LEN, schema.length(family, wanted.data)))
    if wanted.seconds:
        parts.append(nested(nf.NFTA_SET_DESC, number(nf.NFTA_SET_DESC_SIZE, wanted.size)))
        parts.append(attribute(nf.NFTA_SET_TIMEOUT, (1000 * wanted.seconds).to_bytes(8, "big")))
    elif schema.RANGE in wanted.key:
        widths = (
            nested(nf.NFTA_LIST_ELEM, number(nf.NFTA_SET_FIELD_LEN, schema.width(family, field)))
            for field in wanted.key
        )
        parts.append(nested(nf.NFTA_SET_DESC, nested(nf.NFTA_SET_DESC_CONCAT, *widths)))
    return b"".join(parts)


def _chain(chain: schema.Chain) -> bytes:
    body = string(nf.NFTA_CHAIN_NAME, chain.name)
    if chain.hook is None:
        return body
    priority = struct.pack(">i", chain.hook.priority)
    place = number(nf.NFTA_HOOK_HOOKNUM, chain.hook.number) + attribute(nf.NFTA_HOOK_PRIORITY, priority)
    policy = number(nf.NFTA_CHAIN_POLICY, chain.hook.policy)
    return body + nested(nf.NFTA_CHAIN_HOOK, place) + policy + string(nf.NFTA_CHAIN_TYPE, chain.hook.type)


def _rule(chain: str, rule: Rule) -> bytes:
    expressions = (
        nested(
            nf.NFTA_LIST_ELEM,
            string(nf.NFTA_EXPR_NAME, expression.name),
            nested(nf.NFTA_EXPR_DATA, _attributes(expression.attributes)),
        )
        for expression in rule.expressions
    )
    digest = rule.digest.encode()
    data = attribute(nf.NFTA_RULE_USERDATA, bytes([_DIGEST, len(digest)]) + digest)
    return string(nf.NFTA_RULE_CHAIN, chain) + nested(nf.NFTA_RULE_EXPRESSIONS, *expressions) + data


def _key_encoder(codec: Codec, wanted: schema.Set) -> Callable[[schema.Key], bytes]:
    """Key -> the attributes of an element that hold it."""
    if schema.RANGE in wanted.key:

        def ends(key: schema.Key) -> bytes:
            first, last = codec.range_ends(wanted.key, key)
            start = nested(nf.NFTA_SET_ELEM_KEY, attribute(nf.NFTA_DATA_VALUE, first))
            return start + nested(nf.NFTA_SET_ELEM_KEY_END, attribute(nf.NFTA_DATA_VALUE, last))

        return ends
    encode = codec.encoder(wanted.key)
    return lambda key: nested(nf.NFTA_SET_ELEM_KEY, attribute(nf.NFTA_DATA_VALUE, encode(key)))


def _value(codec: Codec, value: tuple[str, int] | int | Verdict) -> bytes:
    if isinstance(value, Verdict):
        return _attributes(value.attributes)
    if isinstance(value, int):
        return attribute(nf.NFTA_DATA_VALUE, value.to_bytes(4, sys.byteorder))
    address, port = value
    return attribute(nf.NFTA_DATA_VALUE, codec.address(address) + port.to_bytes(2, "big") + bytes(2))


def _chunks(name: str, elements: Iterable[bytes]) -> Iterator[bytes]:
    """Bodies of messages, each with as many elements as it has room for."""
    head = string(nf.NFTA_SET_ELEM_LIST_SET, name)
    return (head + nested(nf.NFTA_SET_ELEM_LIST_ELEMENTS, *some) for some in parcels(elements, ELEMENTS_ROOM))


# Decoding


def _only_value(data: bytes) -> bytes:
    """The value of the only attribute in an attribute, behind its header of four bytes."""
    return data[4:]


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _user_data(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    offset = 0
    while offset + 2 <= len(data):
        kind, size = data[offset], data[offset + 1]
        found[kind] = data[offset + 2 : offset + 2 + size]
        offset += 2 + size
    return found
