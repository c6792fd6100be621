"""A mapping of which copies share what did not change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybrid_proxy.dataplane.shards import Shards

NAMES = st.integers(0, 2000).map("team/shop-{}".format)
CHANGES = st.dictionaries(NAMES, st.lists(st.integers(), max_size=2).map(tuple), max_size=30)


@given(st.lists(CHANGES, max_size=12))
def test_it_is_a_dictionary_whose_copies_do_not_change_each_other(steps: list[dict[str, tuple[int, ...]]]) -> None:
    shards, wanted = Shards[tuple[int, ...]](), dict[str, tuple[int, ...]]()
    before: list[tuple[Shards[tuple[int, ...]], dict[str, tuple[int, ...]]]] = []
    for changes in steps:
        before.append((shards, wanted))
        shards = shards.replaced(changes)
        wanted = {name: value for name, value in (wanted | changes).items() if value}
        assert dict(shards) == wanted
        assert len(shards) == len(wanted)
        assert all(name in shards for name in wanted)
        assert "team/other" not in shards
    assert all(dict(former) == content for former, content in before)
    for former, content in before:
        other = {name for name in content | wanted if content.get(name) != wanted.get(name)}
        assert former.differing(shards) == shards.differing(former) == other


def test_a_copy_copies_the_part_that_a_change_is_in_alone() -> None:
    many = Shards[tuple[int, ...]]().replaced({f"team/shop-{number}": (number,) for number in range(5000)})
    after = many.replaced({"team/shop-7": (8,)})
    same = [old is new for old, new in zip(many.parts, after.parts, strict=True)]
    assert same.count(False) == 1
    assert many.replaced({}) is many
