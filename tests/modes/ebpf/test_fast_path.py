"""Which packets bypass the stack, by the setting and by what packets meet there."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_proxy.dataplane.modes.ebpf.hooks.fast_path import FastPath, decide
from hybrid_proxy.dataplane.modes.ebpf.maps import layout

WORDS = layout.abi_constants()
MET = ["inet wall forward", "program shaper at veth0"]


@pytest.mark.parametrize(
    ("setting", "met", "path"),
    [
        ("auto", [], "always"), ("auto", MET, "established"), ("always", [], "always"), ("always", MET, "always"),
        ("established", [], "established"), ("off", MET, "off"),
    ],
)  # fmt: skip
def test_auto_skips_nothing_and_always_warns(setting: str, met: list[str], path: str) -> None:
    decision = decide(setting, met)
    assert decision.path == path
    assert bool(decision.warning) is (setting == "always" and bool(met))
    assert setting != "auto" or not met or MET[0] in decision.why


@pytest.mark.parametrize("former", ["OFF", "ESTABLISHED", "ALWAYS"])
def test_until_somebody_looks_the_last_decision_stays(former: str) -> None:
    row = np.zeros(1, dtype=layout.dtype_of("node"))
    row["fast_path"] = WORDS[f"FAST_PATH_{former}"]
    met: list[str] = []
    made = FastPath("auto", lambda: row, lambda: met)
    assert row["fast_path"] == WORDS["FAST_PATH_ALWAYS" if former == "ALWAYS" else "FAST_PATH_ESTABLISHED"]
    for now, path in (([], "ALWAYS"), (MET, "ESTABLISHED"), ([], "ALWAYS")):
        met[:] = now
        made.maintain()
        assert row["fast_path"] == WORDS[f"FAST_PATH_{path}"]
