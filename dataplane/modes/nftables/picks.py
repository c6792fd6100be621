"""PURE. Builds chains that pick a backend: one for each combination of number of backends, masquerading and affinity.

A chain `internal-10-ne` serves all frontends with 10 backends whose packets are masqueraded for clients of the classes
node and external (p: pod, n: node, e: external).

With affinity, a client whose backend is no member of the backend set any more is forgotten and gets another backend by
its next packet: no entry must be found and deleted when a backend is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.modes.nftables.tables import KEPT_MARKS, MEMBERS, SPACES, clients_set, mark_chain, port_only
from hybrid_proxy.dataplane.nftables import expressions as x
from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.nftables.expressions import ChainName, Expression, Family, Part, Rule, rule
from hybrid_proxy.dataplane.nftables.schema import Chain
from hybrid_proxy.dataplane.table import Masquerade


class Pick(NamedTuple):
    """The parameters of a picking chain; verdicts lead to it."""

    space: str
    backends: int
    classes: Masquerade
    seconds: int = 0  # of affinity
    members: int = 0  # of affinity: which backend set of the service port

    @property
    def name(self) -> str:
        """The chain's name."""
        name = f"{self.space}-{self.backends}-{_CLASSES[self.classes]}"
        return f"{name}-{self.seconds}-{self.members}" if self.seconds else name


_CLASSES: Final = {
    classes: mark_chain(classes).removeprefix("mark-") or "none" for classes in map(Masquerade, range(8))
}
_CLASSES_NAMED: Final = {letters: classes for classes, letters in _CLASSES.items()}
_PICK: Final = re.compile(rf"({'|'.join(SPACES)})-([1-9]\d*)-({'|'.join(_CLASSES_NAMED)})(?:-([1-9]\d*)-([01]))?")


def chain_named(name: str) -> ChainName:
    """Returns the chain of that name as a verdict has it: a `Pick` if it picks a backend."""
    found = _PICK.fullmatch(name)
    if found is None:
        return name
    space, backends, letters, seconds, members = found.groups()
    return Pick(space, int(backends), _CLASSES_NAMED[letters], int(seconds or 0), int(members or 0))


def pick_chain(family: Family, pick: Pick) -> Chain:
    """Mark for masquerading, then translate.

    Between two lookups of one packet another transaction can take effect: the slot that was drawn may be gone.
    Then the first slot serves; if that is gone as well so is the service, and the packet is not let out untranslated.
    """
    rules = []
    if pick.classes:
        rules.append(rule(x.jump(mark_chain(pick.classes))))
    if pick.seconds:
        rules += _affinity(family, pick)
    rules.append(rule(_random_backend(family, pick, pick.backends)))
    if pick.backends > 1:
        rules.append(rule(_random_backend(family, pick, 1)))
    rules.append(rule(x.count("no-slot"), x.DROP))
    return Chain(pick.name, tuple(rules))


def _random_backend(family: Family, pick: Pick, slots: int) -> Part:
    return *_random_slot(family, pick, f"{pick.space}-slots", slots), *family.dnat()


def _random_slot(family: Family, pick: Pick, name: str, slots: int) -> Part:
    """Load what a map has for a random one of the frontend's first slots."""
    key = family.load_key(1, port_only=port_only(pick.space))
    return x.random(slots, 0), *key, x.lookup(name, 0, into=0)


# Session affinity. A value that was looked up can be part of another key only if a field of the packet carries it.
# Two serve: its priority, which is cleared at the end, and its mark, which is kept in a map meanwhile.


def _affinity(family: Family, pick: Pick) -> Iterator[Rule]:
    """Apply the same rules twice: if the remembered backend is no member any more, the client chooses again."""
    clients = clients_set(pick.seconds).name
    load_number = _number_to_priority(family, pick)
    once = (
        rule(
            load_number, _keep_mark(family), _candidate_to_mark(family, pick),
            _write_client(family, clients, nf.NFT_DYNSET_OP_UPDATE),
        ),
        rule(_restore_mark(family)),
        rule(_remembered_backend(family, clients, MEMBERS[pick.members])),
    )  # fmt: skip
    yield from once
    yield rule(load_number, _write_client(family, clients, nf.NFT_DYNSET_OP_DELETE))
    yield from once
    yield rule((x.immediate(0, bytes(4)), x.set_meta(nf.NFT_META_PRIORITY, 0)))  # no priority is left


def _number_to_priority(family: Family, pick: Pick) -> Part:
    """Set the packet's priority to the number of the service port."""
    key = family.load_key(port_only=port_only(pick.space))
    return *key, x.lookup(f"{pick.space}-numbers", 0, into=0), x.set_meta(nf.NFT_META_PRIORITY, 0)


def _candidate_to_mark(family: Family, pick: Pick) -> Part:
    """Set the packet's mark to the number of a random backend of the frontend."""
    slot = _random_slot(family, pick, f"{pick.space}-candidates", pick.backends)
    return *slot, x.set_meta(nf.NFT_META_MARK, 0)


def _connection(family: Family) -> Part:
    """Load the key of the map of kept marks: source, source port, protocol."""
    port = x.payload(nf.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2, family.words)
    return family.load_source(), port, x.meta(nf.NFT_META_L4PROTO, family.words + 1)


def _keep_mark(family: Family) -> Part:
    """Store the packet's mark in the map of kept marks."""
    word = family.words + 2
    update = x.dynset(KEPT_MARKS, nf.NFT_DYNSET_OP_UPDATE, 0, word)
    return *_connection(family), x.meta(nf.NFT_META_MARK, word), update


def _restore_mark(family: Family) -> Part:
    """Restore the packet's mark."""
    word = family.words + 2
    fetch = (*_connection(family), x.lookup(KEPT_MARKS, 0, into=0), x.set_meta(nf.NFT_META_MARK, 0))
    delete = x.dynset(KEPT_MARKS, nf.NFT_DYNSET_OP_DELETE, 0, word)
    return *fetch, *_connection(family), x.meta(nf.NFT_META_MARK, word), delete


def _client(family: Family) -> tuple[Expression, Expression]:
    """Load the key of a map of clients: source, number of the service port."""
    return family.load_source(), x.meta(nf.NFT_META_PRIORITY, family.words)


def _write_client(family: Family, clients: str, operation: int) -> Part:
    """Update: give the client that backend unless it has one, and restart its time. Delete: forget its backend."""
    word = family.words + 1
    return *_client(family), x.meta(nf.NFT_META_MARK, word), x.dynset(clients, operation, 0, word)


def _remembered_backend(family: Family, clients: str, members: str) -> Part:
    """Translate to the client's backend, if that is still a member; clears the priority."""
    priority, word = nf.NFT_META_PRIORITY, family.words + 1
    number = (*_client(family), x.lookup(clients, 0, into=0), x.set_meta(priority, 0))
    address = (x.meta(priority, 0), x.lookup(members, 0, into=0))
    return *number, *address, x.immediate(word, bytes(4)), x.set_meta(priority, word), *family.dnat()
