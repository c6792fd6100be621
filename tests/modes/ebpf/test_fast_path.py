"""Which packets bypass the stack, by the setting and by what packets meet there."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hybrid_proxy.dataplane.modes.ebpf.hooks.fast_path import FastPath, decide
from hybrid_proxy.dataplane.modes.ebpf.maps import layout

WORDS = layout.abi_constants()
MET = ["inet wall forward", "program shaper at veth0"]
LIMITS = ["qdisc tbf at veth0"]


@pytest.mark.parametrize(
    ("setting", "met", "limits", "path", "warned"),
    [
        ("auto", [], [], "always", ""), ("auto", MET, [], "established", ""), ("auto", MET, LIMITS, "off", ""),
        ("always", [], [], "always", ""), ("always", MET, [], "always", MET[0]),
        ("always", [], LIMITS, "always", LIMITS[0]), ("established", [], [], "established", ""),
        ("established", MET, [], "established", ""), ("established", [], LIMITS, "established", LIMITS[0]),
        ("off", MET, LIMITS, "off", ""),
    ],
)  # fmt: skip
def test_auto_skips_nothing_and_other_settings_warn(
    setting: str, met: list[str], limits: list[str], path: str, warned: str
) -> None:
    decision = decide(setting, met, limits)
    assert decision.path == path
    assert warned in decision.warning
    assert bool(decision.warning) is bool(warned)
    assert setting != "auto" or not (met or limits) or (limits or met)[0] in decision.why


def test_chains_of_a_mode_that_drains_are_not_listed_as_somebody_elses() -> None:
    own = ["ip hybrid-proxy nat-prerouting", "ip6 hybrid-proxy nat-output"]
    assert decide("auto", own)[:2] == ("established", "the stack has what a former mode has for its flows")
    assert decide("auto", [*own, *MET]).why == f"the stack has {', '.join(MET)}"


def test_each_edit_of_a_firewall_is_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hybrid_proxy")
    row, met = np.zeros(1, dtype=layout.dtype_of("node")), list(MET)
    made = FastPath("auto", lambda: row, lambda: met, lambda: False, list)
    made.maintain()
    assert [(each.levelname, "inet wall forward" in each.getMessage()) for each in caplog.records] == [("DEBUG", True)]


@pytest.mark.parametrize("former", ["OFF", "ESTABLISHED", "ALWAYS", "DIRECT"])
def test_until_somebody_looks_the_last_decision_stays(former: str) -> None:
    row = np.zeros(1, dtype=layout.dtype_of("node"))
    row["fast_path"] = WORDS[f"FAST_PATH_{former}"]
    met: list[str] = []
    limits: list[str] = []
    made = FastPath("auto", lambda: row, lambda: met, lambda: False, lambda: limits)
    assert row["fast_path"] == WORDS[f"FAST_PATH_{former}"]
    for now, limited, path in (
        ([], [], "DIRECT"), (MET, [], "ESTABLISHED"), ([], LIMITS, "OFF"), ([], [], "DIRECT"),
    ):  # fmt: skip
        met[:], limits[:] = now, limited
        made.maintain()
        assert row["fast_path"] == WORDS[f"FAST_PATH_{path}"]


def test_what_belongs_to_no_flow_meets_rules_even_if_flows_do_not() -> None:
    row = np.zeros(1, dtype=layout.dtype_of("node"))
    met = list(MET)
    made = FastPath("always", lambda: row, lambda: met, lambda: False, list)
    for now, path in ((MET, "ALWAYS"), ([], "DIRECT")):
        assert row["fast_path"] == WORDS["FAST_PATH_ALWAYS"]
        met[:] = list(now)
        made.maintain()
        assert row["fast_path"] == WORDS[f"FAST_PATH_{path}"]
    made.keep_to_flows()
    assert row["fast_path"] == WORDS["FAST_PATH_ALWAYS"], "another mode begins to translate"


def test_what_a_program_takes_back_is_decided_again() -> None:
    row = np.zeros(1, dtype=layout.dtype_of("node"))
    made = FastPath("auto", lambda: row, list, lambda: False, list)
    made.maintain()
    row["fast_path"] = WORDS["FAST_PATH_ALWAYS"]  # a packet was translated
    made.maintain()
    assert row["fast_path"] == WORDS["FAST_PATH_DIRECT"]


def test_what_may_be_translated_without_a_rule_needs_the_stack_unless_it_is_a_flow() -> None:
    row = np.zeros(1, dtype=layout.dtype_of("node"))
    made = FastPath("auto", lambda: row, list, lambda: True, list)
    made.maintain()
    assert (row["fast_path"], made.decision.path) == (WORDS["FAST_PATH_ALWAYS"], "always")
