"""Which variant of iptables a node uses, and what its tools refuse."""

from __future__ import annotations

import re

import pytest

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel.xtables import Xtables, XtablesError, find

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]
RULES_OF_OTHERS = "*nat\n:OTHERS - [0:0]\n-A PREROUTING -j OTHERS\n-A OUTPUT -j OTHERS\nCOMMIT\n"


def test_the_variant_is_where_the_kubelet_left_its_hint(variant: str) -> None:
    Xtables("nft" if variant == "legacy" else "legacy").restore(4, RULES_OF_OTHERS)
    Xtables(variant).restore(6, "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n")
    found = find()
    assert found.variant == variant
    assert "kubelet" in found.chosen


def test_without_a_hint_the_variant_is_where_others_have_their_rules(variant: str) -> None:
    Xtables(variant).restore(4, RULES_OF_OTHERS)
    assert find().variant == variant


def test_rules_of_our_modes_are_not_those_of_others(variant: str) -> None:
    chains = ("HP-SERVICES", "HPV-PREROUTING", "HP-SEP-X")
    rules = [f'-A PREROUTING -m comment --comment "a b" -j {chain}' for chain in chains[:2]]
    rules += ["-A HP-SERVICES -p tcp -g HP-SEP-X", "-A HP-SEP-X -j RETURN"]
    text = "".join(f":{chain} - [0:0]\n" for chain in chains) + "\n".join(rules)
    Xtables(variant).restore(4, f"*nat\n{text}\nCOMMIT\n")
    assert re.findall(r"\d+", find().chosen) == ["0", "4"]
    assert find().variant == variant, "the other one would leave ours in force"
    Xtables(variant).restore(4, RULES_OF_OTHERS)
    assert re.findall(r"\d+", find().chosen) == ["2", "4"]


def test_what_is_missing_is_reported(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Xtables(variant).restore(4, RULES_OF_OTHERS)
    with pytest.raises(Unsupported, match="MISSING"):
        find(lambda _: {"nat": ("-j MISSING",)})
    only6 = find(lambda family: {"nat": ("-j MISSING",) if family == 4 else ()})
    assert only6.families == (6,)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("hybrid_proxy.dataplane.kernel.xtables.search_path", lambda: "")
    with pytest.raises(Unsupported, match="install the package iptables"):
        find()


def test_an_error_shows_the_line_that_is_wrong(variant: str) -> None:
    with pytest.raises(XtablesError, match="line 3 is: -A HP-X -p nonsense"):
        Xtables(variant).restore(4, "*nat\n:HP-X - [0:0]\n-A HP-X -p nonsense -j RETURN\nCOMMIT\n")
