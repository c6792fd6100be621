"""What is remembered of settings, with files in place of /proc/sys: whatever others do meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.dataplane.kernel import sysctl

NAMES = ("net/a", "net/b", "net/c")


class Settings:
    """A folder of settings, each with the value 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "sys"
        self.memory = folder / "run"
        for name in (*NAMES, "net/ipv4/ip_forward"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text("0\n")

    def by_hand(self, name: str, value: str) -> None:
        (self.folder / name).write_text(value + "\n")

    def now(self) -> dict[str, str]:
        return {name: (self.folder / name).read_text().strip() for name in NAMES}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    made = Settings(tmp_path)
    monkeypatch.setattr(sysctl, "FOLDER", made.folder)
    monkeypatch.setattr(sysctl, "MEMORY", made.memory)
    return made


OURS = st.tuples(st.just("ours"), st.sampled_from(NAMES), st.sampled_from(["0", "1", "2"]))
THEIRS = st.tuples(st.just("theirs"), st.sampled_from(NAMES), st.sampled_from(["7", "8"]))
STEPS = st.lists(OURS | THEIRS, max_size=12)


@settings(deadline=None)
@given(STEPS)
def test_what_was_before_comes_back_where_nobody_else_has_changed_it(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, str]]
) -> None:
    fake = Settings(tmp_path_factory.mktemp("settings"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysctl, "FOLDER", fake.folder)
        patch.setattr(sysctl, "MEMORY", fake.memory)
        expected = fake.now()  # the last value that is not ours
        for who, name, value in steps:
            if who == "ours":
                assert sysctl.apply({name: value}) == {}
                assert fake.now()[name] == value
            else:
                fake.by_hand(name, value)
                expected[name] = value
        sysctl.restore()
        assert fake.now() == expected
        assert sysctl.changed() == ()
        assert list(fake.memory.glob("*")) == []


def test_what_cannot_be_set_is_not_remembered(fake: Settings) -> None:
    assert "no setting" in sysctl.apply({"net/none": "1", "net/a": "1"})["net/none"]
    assert sysctl.changed() == ("net/a",)


def test_forwarding_stays(fake: Settings) -> None:
    assert sysctl.apply({"net/ipv4/ip_forward": "1"}) == {}
    assert sysctl.restore() == (0, {})
    assert sysctl.read("net/ipv4/ip_forward") == "1"


def test_a_memory_that_cannot_be_read_or_written_stops_nothing(
    fake: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    sysctl.apply({"net/a": "1"})
    (memory,) = fake.memory.iterdir()
    memory.write_bytes(b'{"net/a": 5')
    assert sysctl.restore() == (0, {})
    fake.memory.rename(fake.memory.with_name("gone"))
    fake.memory.write_text("no folder")
    assert sysctl.apply({"net/b": "1"}) == {}
    assert fake.now() == {"net/a": "1", "net/b": "1", "net/c": "0"}
    assert "will not put settings" in caplog.text
