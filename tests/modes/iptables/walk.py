"""Walks a packet through chains as the kernel would, with every choice that it could make."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network

from tests.fakes.xtables import FakeXtables

MARK_BIT = 0x4000


@dataclass(frozen=True)
class Packet:
    src: str
    dst: str
    protocol: str
    port: int
    interface: str = ""
    local_source: bool = False  # the address is one of the node's
    local_target: bool = False
    state: str = "NEW"
    confirmed: bool = False  # conntrack knows the flow
    mark: int = 0


@dataclass
class Ways:
    """What may happen to a packet: where it may be sent, with which mark, and how it ends."""

    goals: set[str] = field(default_factory=set)
    marks: set[int] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)
    steps: int = 0


class Walker:
    """Chains of one family."""

    def __init__(self, xtables: FakeXtables, family: int) -> None:
        self.tables = {table: xtables.tables[family, table].chains for table in ("nat", "filter")}

    def first_packet(self, packet: Packet) -> Ways:
        """From the hook where it appears, through nat, and through filter if nothing translated it."""
        hook = "OUTPUT" if packet.local_source else "PREROUTING"
        nat = Ways()
        left = self.chain("nat", hook, packet, nat)
        untouched = [*left, *(replace(packet, mark=mark) for mark in nat.marks if "ACCEPT" in nat.ends)]
        if nat.goals:
            return nat
        ways = Ways(steps=nat.steps)
        hook = "OUTPUT" if packet.local_source else "INPUT" if packet.local_target else "FORWARD"
        for each in untouched:
            ways.marks |= {after.mark for after in self.chain("filter", hook, each, ways)}
        return ways

    def chain(self, table: str, name: str, packet: Packet, ways: Ways) -> list[Packet]:
        """Packets that come out at the end of the chain, with the marks that they may have."""
        packets = [packet]
        for rule in self.tables[table][name]:
            ways.steps += 1
            words = shlex.split(rule)
            matching = [each for each in packets if _matches(words, each)]
            if not matching:
                continue
            chosen = [] if "statistic" in words else matching  # by chance: it may go on as well
            packets = [each for each in packets if each not in chosen]
            target = words[words.index("-g" if "-g" in words else "-j") + 1]
            for each in matching:
                if target == "RETURN":
                    return [*packets, *matching]
                if target == "MARK":
                    value, mask = (int(part, 16) for part in words[words.index("--set-xmark") + 1].split("/"))
                    packets.append(replace(each, mark=(each.mark & ~mask) ^ value))
                elif target in ("ACCEPT", "DROP", "REJECT"):
                    ways.ends.add(target)
                    ways.marks.add(each.mark)
                elif target == "DNAT":
                    ways.goals.add(words[words.index("--to-destination") + 1])
                    ways.marks.add(each.mark)
                    ways.ends.add("DNAT")
                else:
                    left = self.chain(table, target, each, ways)
                    if "-g" in words:
                        return [*packets, *left]
                    packets += left
        return packets


def _matches(words: list[str], packet: Packet) -> bool:
    position, invert = 0, False
    while position < len(words):
        word = words[position]
        if word == "!":
            invert, position = True, position + 1
            continue
        if word in ("-j", "-g"):
            return True
        taken, fits = _option(word, words[position + 1] if position + 1 < len(words) else "", packet)
        if fits == invert:
            return False
        position, invert = position + taken, False
    return True


def _option(word: str, value: str, packet: Packet) -> tuple[int, bool]:
    """How many words the option has, and whether the packet fits."""
    match word:
        case "-d" | "-s":
            return 2, ip_address(packet.dst if word == "-d" else packet.src) in ip_network(value)
        case "-p":
            return 2, packet.protocol == value
        case "-i":
            return 2, packet.interface.startswith(value[:-1]) if value.endswith("+") else packet.interface == value
        case "--dport":
            first, _, last = value.partition(":")
            return 2, int(first) <= packet.port <= int(last or first)
        case "--src-type":
            return 2, packet.local_source
        case "--dst-type":
            return 2, packet.local_target
        case "--ctstate":
            return 2, packet.state in value.split(",")
        case "--ctstatus":
            return 2, packet.confirmed
        case "--mark":
            wanted, mask = (int(part, 16) for part in value.split("/"))
            return 2, packet.mark & mask == wanted
        case "--rcheck" | "--bytecode":
            return 1, False  # never seen before, and no hairpin
        case "--set" | "--reap" | "--rsource":
            return 1, True
        case "-m" | "--comment" | "--mode" | "--probability" | "--name" | "--mask" | "--seconds":
            return 2, True
    raise AssertionError(f"the walker does not know {word} {value}")
