"""What doctor prints in a terminal, and what it refuses to be asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.controller.commands.columns import Screen
from hybrid_proxy.controller.commands.doctor.checks import diagnose
from hybrid_proxy.controller.commands.doctor.command import lines
from hybrid_proxy.controller.commands.doctor.facts import Finding

FINDINGS = [
    Finding("ok", "object", "shop/web:http (TCP, IPv4)"),
    Finding("ok", "table", "shop/web:http, IPv4: 3 backends (ready endpoints)"),
    Finding(
        "problem", "connections", "targetPort 8081 answers RST on 3 of 3 backends from the node and from a pod",
        "compare targetPort with the port that the container listens on, at all of its addresses", "backend-refuses",
    ),
    Finding("unknown", "drops", "mode nftables reports no packets", "`hybrid-proxy trace --drops` asks the kernel"),
]  # fmt: skip
AT_80 = """\
✗ targetPort 8081 answers RST on 3 of 3 backends from the node and from a pod

✓  object       shop/web:http (TCP, IPv4)
✓  table        shop/web:http, IPv4: 3 backends (ready endpoints)
✗  connections  targetPort 8081 answers RST on 3 of 3 backends from the node and
                from a pod
                → compare targetPort with the port that the container listens
                on, at all of its addresses
?  drops        mode nftables reports no packets
                → `hybrid-proxy trace --drops` asks the kernel

Took 0.4 s. ✓ well  ! warning  ✗ problem  ? not known
"""
AT_120 = """\
✗ targetPort 8081 answers RST on 3 of 3 backends from the node and from a pod

✓  object       shop/web:http (TCP, IPv4)
✓  table        shop/web:http, IPv4: 3 backends (ready endpoints)
✗  connections  targetPort 8081 answers RST on 3 of 3 backends from the node and from a pod
                → compare targetPort with the port that the container listens on, at all of its addresses
?  drops        mode nftables reports no packets
                → `hybrid-proxy trace --drops` asks the kernel

Took 0.4 s. ✓ well  ! warning  ✗ problem  ? not known
"""


@pytest.mark.parametrize(("width", "wanted"), [(80, AT_80), (120, AT_120)])
def test_the_screen(width: int, wanted: str) -> None:
    assert [*lines(diagnose("shop/web", FINDINGS, seconds=0.41), Screen(width))] == wanted.splitlines()


def test_the_headline_breaks_between_words() -> None:
    text = f"{'connections ' * 6}to 10.77.1.12:9999 fail"
    found = diagnose("node", [Finding("problem", "backends", text, cause="backend-refuses")])
    first, second, *_ = lines(found, Screen(80))
    assert (first, second) == (f"✗ {'connections ' * 6}to", "10.77.1.12:9999 fail")
    assert next(iter(lines(found, Screen()))) == f"✗ {text}"


def test_colours_are_for_terminals_alone() -> None:
    shown = "".join(lines(diagnose("shop/web", FINDINGS), Screen(80, colours=True)))
    assert "\x1b[" in shown


# fmt: off
REFUSED = [
    pytest.param(["shop/web", "--to", "10.0.0.1:80"], id="a service and a packet"),
    pytest.param(["--from", "10.0.0.1"], id="a source without a destination"),
    pytest.param(["--to", "10.0.0.1"], id="a destination without a port"),
    pytest.param(["--from", "10.0.0.1", "--to", "10.0.0.2/icmp"], id="no service answers by ICMP"),
    pytest.param(["--from", "here", "--to", "10.0.0.1:80"], id="a source that is no address"),
    pytest.param(["shop/web", "--from", "here"], id="a client that is no address"),
    pytest.param(["--timeout", "0"], id="no time at all"),
    pytest.param(["--timeout", "nan"], id="a time that is no number"),
    pytest.param(["--timeout", "31"], id="too much time"),
    pytest.param(["-n", "shop", "--to", "10.0.0.1:80"], id="a namespace and a packet"),
    pytest.param(["shop/web", "-n", "other"], id="two namespaces"),
]
# fmt: on


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_command_line_that_cannot_be_used_is_exit_code_2(arguments: list[str]) -> None:
    assert cli.main(["doctor", *arguments]) == 2


def test_a_namespace_without_a_service_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["doctor", "-n", "shop", "--admin-socket", str(tmp_path / "none.sock"), "--pin-root", str(tmp_path)]
    assert cli.main(asked) == 1
    assert 'no service in namespace "shop"' in capsys.readouterr().err


def test_where_nothing_was_ever_programmed_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["doctor", "--admin-socket", str(tmp_path / "none.sock"), "--pin-root", str(tmp_path)]
    assert cli.main(asked) == 1
    assert "no agent runs: " in " ".join(capsys.readouterr().out.split())
