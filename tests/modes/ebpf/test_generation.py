"""The steps by which one generation takes the place of another, and which maps both can use."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations.generation import (
    DONE,
    FLOWS,
    OWN,
    TABLES,
    Fate,
    Generation,
    Layout,
    Mark,
    Step,
    UnknownMeaningError,
    fates_of,
    plan_replacement,
)
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import ours
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import bounds, first_sizes, written

SIZES = first_sizes(bounds(Options())) | written(Options(), 2)
SHARED_BY_ALL = frozenset(ours().maps) - OWN


def changed(name: str, text: str, other: str, size: int = 0) -> Layout:
    """Our layout, with something else in the rows of one map; `size`: of the value, where it is another."""
    made = msgspec.json.decode(msgspec.json.encode(ours()), type=Layout)
    shape = list(made.maps[name])
    assert isinstance(shape[5], str)
    assert text in shape[5], shape[5]
    shape[3], shape[5] = size or shape[3], shape[5].replace(text, other)
    made.maps[name] = tuple(shape)  # type: ignore[assignment]
    return made


def numbered(enum: str, name: str, number: int) -> Layout:
    made = msgspec.json.decode(msgspec.json.encode(ours()), type=Layout)
    made.enums[enum][name] = number
    return made


def plan(former: Layout) -> Mapping[str, Fate]:
    return fates_of(Generation(former, SIZES), Generation(ours(), SIZES))


def fates(former: Layout, fate: Fate) -> set[str]:
    return {name for name, found in plan(former).items() if found is fate}


def test_maps_of_the_same_layout_are_shared() -> None:
    assert fates(ours(), Fate.SHARED) == SHARED_BY_ALL


def test_maps_are_shared_where_one_side_knows_a_flag_more() -> None:
    assert fates(numbered("flow_flags", "FLOW_MORE", 1 << 16), Fate.SHARED) == SHARED_BY_ALL


def test_flows_of_another_layout_are_carried_over_and_the_rest_is_shared() -> None:
    former = changed("flows4", "672:bypassed_at:1/4", "672:bypassed_at:1/4,704:more:1/4", 92)
    assert fates(former, Fate.CARRIED) == {*FLOWS}


def test_the_service_table_is_carried_over_as_a_whole() -> None:
    former = changed("backends", "224:failures:1/4", "224:failures:1/4,256:more:1/8", 40)
    assert fates(former, Fate.CARRIED) == {*TABLES} - {"bitmaps", "source_ranges4", "source_ranges6"}


def test_flows_are_carried_over_where_two_fields_change_places() -> None:
    former = changed("flows4", "448:ifindex:1/4,480:started:1/4", "448:started:1/4,480:ifindex:1/4")
    assert fates(former, Fate.CARRIED) == {*FLOWS}


OTHER_MEANINGS = {
    "older": numbered("abi_limits", "ABI_VERSION", 2),
    "newer": numbered("abi_limits", "ABI_VERSION", 99),
    "unknown": msgspec.structs.replace(ours(), enums={}),
}


@pytest.mark.parametrize("former", OTHER_MEANINGS.values(), ids=OTHER_MEANINGS)
def test_rows_of_another_meaning_are_refused(former: Layout) -> None:
    with pytest.raises(UnknownMeaningError):
        plan(former)


def test_hooks_that_call_the_datapath_otherwise_are_refused_only_where_flows_are_carried_over() -> None:
    other = numbered("hook", "HOOK_XDP", 0)
    assert fates(other, Fate.SHARED) == SHARED_BY_ALL
    moved = changed("flows6", "bypassed_at:1/4", "bypassed_at:1/4,704:more:1/4", 92)
    with pytest.raises(UnknownMeaningError, match="hooks"):
        plan(msgspec.structs.replace(moved, enums=other.enums))


def test_buckets_that_are_counted_otherwise_are_not_copied() -> None:
    assert plan(numbered("abi_limits", "TIMEWAIT_BITS", 17))["timewait"] is Fate.NEW
    more = changed("timewait", "struct 64{0:entries:1/8[8]}", "struct 128{0:entries:1/8[16]}", 128)
    assert plan(more)["timewait"] is Fate.CARRIED


# Steps

FIELD_MORE = changed("flows4", "672:bypassed_at:1/4", "672:bypassed_at:1/4,704:more:1/4", 92)
FIELD_LESS = changed("flows4", ",672:bypassed_at:1/4", "", 84)
KEY_WIDER = changed("affinity", "struct 20", "struct 24")
MORE_BACKENDS = changed("backends", "224:failures:1/4", "224:failures:1/4,256:more:1/8", 40)
BRIDGED = "MAKE COPY LOAD LINK BRIDGE COPY_FLOWS NEW_FLOWS COPY_FLOWS ALL_FLOWS MERGE PUBLISH REMOVE"
CASES = [
    ("first start", None, None, "MAKE LOAD PUBLISH"),
    ("restart", Generation(ours(), SIZES), None, "LOAD PUBLISH"),
    ("a larger table, before it serves",
     Generation(ours(), SIZES | {"slots": 16}, serves=False), None, "MAKE COPY RENAME LOAD PUBLISH"),
    ("a larger table",                    Generation(ours(), SIZES | {"slots": 16}),             None,
     "MAKE LOAD COPY PUBLISH RENAME"),
    ("other tables of flows",             Generation(ours(), SIZES | {"flows4": 16}),            None, BRIDGED),
    ("flows with a field more",           Generation(FIELD_MORE, SIZES),                         None, BRIDGED),
    ("flows with a field less",           Generation(FIELD_LESS, SIZES),                         None, BRIDGED),
    ("the same maps in another directory", Generation(ours(), SIZES, place="abi3-0"), None,
     "MAKE COPY LOAD LINK PUBLISH REMOVE"),
    ("rows of backends with a field more", Generation(MORE_BACKENDS, SIZES),                     None,
     "MAKE COPY LOAD LINK PUBLISH REMOVE"),
    ("killed before flows are given away", Generation(FIELD_MORE, SIZES),                        Mark.ALL_FORMER,
     "LOAD LINK BRIDGE COPY_FLOWS NEW_FLOWS COPY_FLOWS ALL_FLOWS MERGE PUBLISH REMOVE"),
    ("killed when new flows are ours",    Generation(FIELD_MORE, SIZES),                         Mark.NEW_FLOWS_OURS,
     "LOAD LINK BRIDGE COPY_FLOWS ALL_FLOWS MERGE PUBLISH REMOVE"),
    ("killed when all flows are ours",    Generation(FIELD_MORE, SIZES),                         Mark.ALL_OURS,
     "LOAD LINK PUBLISH REMOVE"),
]  # fmt: skip


@pytest.mark.parametrize(("former", "mark", "steps"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_replacement_is_these_steps(former: Generation | None, mark: Mark | None, steps: str) -> None:
    plan = plan_replacement(former, Generation(ours(), SIZES), mark)
    assert " ".join(step.name for step in plan.steps) == steps
    assert plan.bridged == (former is not None and plan.fates["flows6"] is Fate.CARRIED)


def test_a_wider_key_of_affinity_needs_no_bridge() -> None:
    plan = plan_replacement(Generation(KEY_WIDER, SIZES), Generation(ours(), SIZES))
    assert plan.fates["affinity"] is Fate.CARRIED
    assert Step.BRIDGE not in plan.steps


def test_the_mark_is_what_programs_read() -> None:
    states = abi_constants()
    assert {state: states[f"CARRY_{state.name}"] for state in Mark} == {state: state.value for state in Mark}
    assert DONE.keys() == set(Mark)
