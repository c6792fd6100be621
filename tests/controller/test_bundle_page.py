"""The page of a bundle: what objects are named can neither make an element nor load anything."""

from __future__ import annotations

from html.parser import HTMLParser

import msgspec
import pytest

from hybrid_proxy.controller.commands.bundle_page import MOST, page
from hybrid_proxy.controller.commands.doctor.checks import diagnose
from hybrid_proxy.controller.commands.doctor.facts import Finding
from hybrid_proxy.controller.semantics.history import ChangeRow
from hybrid_proxy.controller.serving.protocol import NoAgentStatus
from hybrid_proxy.dataplane.reports import PacketEvent, ServiceRow

HOSTILE = "</pre><script src=//x>alert('1')</script><img src=x onerror=\"y\">&lt;\x1b[31m"
OURS = {"html", "meta", "title", "style", "h1", "p", "details", "summary", "pre", "ul", "li"}


class Elements(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def rows(name: str, count: int) -> bytes:
    return msgspec.json.encode(
        [ServiceRow(name=name, frontends=["10.96.0.10:80"], protocol="TCP", backends=1) for _ in range(count)]
    )


CONTENTS = {
    "agent/status.json": msgspec.json.encode(NoAgentStatus(reason=HOSTILE, programmed={}, error=HOSTILE)),
    "doctor.json": msgspec.json.encode(
        diagnose(HOSTILE, [Finding("problem", "x", HOSTILE, HOSTILE, "backend-refuses")])
    ),
    "dataplane/services.json": rows(HOSTILE, 1),
    "agent/changes.json": msgspec.json.encode([ChangeRow(first=0, last=0, kind="service", service=HOSTILE)]),
    "agent/command-line.txt": HOSTILE.encode(),
    "agent/drops.json": HOSTILE.encode(),  # it was cut
}


@pytest.mark.parametrize("part", CONTENTS)
def test_a_hostile_name_is_text(part: str) -> None:
    text = page({part: CONTENTS[part]}, {HOSTILE: HOSTILE}, HOSTILE, 0).decode()
    found = Elements(text)
    assert found.elements <= OURS
    assert found.attributes <= {"lang", "charset", "name", "content", "http-equiv", "open", "class"}
    assert found.text.count("<script src=//x>") > 3  # the title, the heading, the part, what is missing
    assert "\x1b" not in text


def test_only_the_first_of_many_services_are_in_it() -> None:
    text = Elements(page({"dataplane/services.json": rows("a/b:c", MOST + 1)}, {}, "n", 0).decode()).text
    assert text.count("a/b:c") == MOST
    assert f"{MOST} of {MOST + 1}" in text


def test_equal_drops_are_one_row_and_a_repair_is_whole() -> None:
    drops = [
        PacketEvent(
            number=number, time=1.8e9, what="refuse", reason="reject", message="rejected: no ready endpoints",
            service="a/b:c", protocol="TCP", source=f"10.77.1.11:{number}", destination="10.96.0.99:80", backend=None,
            where="from a pod", interface=None,
        )
        for number in range(1, 40)
    ]  # fmt: skip
    repair = ChangeRow(first=1.8e9, last=1.8e9, kind="repair", what="x" * 400 + "end")
    parts = {"agent/drops.json": {"events": drops}, "agent/changes.json": [repair]}
    text = Elements(
        page({name: msgspec.json.encode(part) for name, part in parts.items()}, {}, "n", 1.8e9).decode()
    ).text
    assert text.count("a/b:c") == 1
    assert "39 x" in text
    assert "xend" in text
