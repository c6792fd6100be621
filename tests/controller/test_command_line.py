"""What every command has in common: exit codes, suggestions, the version."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_proxy.controller import __version__, cli
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.semantics.explain import Verdict
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.settings.documents import rows
from hybrid_proxy.dataplane.reports import Unprogrammed

# fmt: off
WRONG = (
    pytest.param(["stat"],                         "did you mean status?",      id="a-mistyped-command"),
    pytest.param(["service", "default/web"],       "did you mean services?",    id="a-command-in-the-singular"),
    pytest.param(["get", "services"],             "did you mean services?",    id="kubectls-command"),
    pytest.param(["nonsense"],                     'no command "nonsense"',     id="no-such-command"),
    pytest.param([],                               "start here:",               id="no-command"),
    pytest.param(["services", "--outptu", "json"], "did you mean --output",     id="a-mistyped-flag"),
    pytest.param(["lab", "up", "--nmae", "x"],     "did you mean --name?",      id="a-mistyped-flag-of-an-action"),
    pytest.param(["flows", "--limits=3"],          "did you mean --limit?",     id="a-mistyped-flag-with-a-value"),
    pytest.param(["run", "--mode", "ebfp"],        "did you mean --proxy-mode ebpf?", id="a-shorter-flag-and-a-typo"),
    pytest.param(["cleanup", "--drain", "abc"],    "'abc' is not a number of seconds, such as 30", id="no-duration"),
    pytest.param(["services", "a/b", "c/d"],       "c/d",                       id="one-word-too-many"),
    pytest.param(["status", "default/web"],        "`hybrid-proxy services default/web`", id="no-service-here"),
    pytest.param(["services", "-o", "table"],      "table",                     id="no-such-output"),
    pytest.param(["services", "-n", "a", "-A"],    "not allowed with",          id="one-namespace-and-all"),
    pytest.param(["flows", "--limit", "-1"],       "'-1' is not a whole number", id="a-limit-below-one"),
    pytest.param(["trace", "--seconds", "-1"],     "'-1' is not a number of",  id="no-time"),
    pytest.param(["trace", "--seconds", "nan"],    "'nan' is not a number of", id="no-number"),
    pytest.param(["switch", "--outptu", "json"],   "did you mean --output",     id="a-mistyped-flag-before-a-mode"),
    pytest.param(["flows", "--mode", "foo"],       "'foo' is none of ebpf",    id="flows-of-no-mode"),
    pytest.param(["version"],                      "did you mean --version?",   id="the-version-as-a-command"),
    pytest.param(["logs"],                         "journalctl -u hybrid-proxy", id="the-log-as-a-command"),
    pytest.param(["lab", "ups"],                   "did you mean up?",          id="a-mistyped-action"),
    pytest.param(["services", "-o", "jsno"],       "did you mean json?",        id="a-mistyped-value"),
    pytest.param(["help", "doctr"],                "did you mean doctor?",             id="help-for-no-command"),
    pytest.param(["completion", "tcsh"],           "tcsh",                      id="no-such-shell"),
)
# fmt: on


@pytest.mark.parametrize(("argv", "said"), WRONG)
def test_wrong_use_exits_with_2_and_suggests(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == cli.USAGE
    assert said in capsys.readouterr().err


def test_a_mode_that_there_is_not_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["switch", "ebfp"]) == cli.USAGE
    assert "no mode 'ebfp'; there are ebpf" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "usage"), [(["help"], "hybrid-proxy "), (["help", "doctor"], "hybrid-proxy doctor")])
def test_help_is_printed_for_the_word_too(argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == cli.OK
    assert capsys.readouterr().out.startswith(f"usage: {usage}")


@pytest.mark.parametrize("columns", [70, 80, 120])
def test_help_fits_the_terminal_and_its_examples_can_be_pasted(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    root = cli.parser()
    for command in (root, *cli.commands_of(root).values()):
        text = command.format_help()
        assert not [line for line in text.splitlines() if len(line) > columns], command.prog
        examples = _commands(command.epilog or "")
        assert _commands(text.partition("\noptions:")[2]) == examples, command.prog
        assert examples, command.prog


def _commands(text: str) -> list[str]:
    """What a shell gets of the lines that begin with a command, without their explanations."""
    lines = re.sub(r"\\\n *", "", text).splitlines()
    return [re.split(r"  +", line.strip())[0] for line in lines if re.match(r" +(source <\()?hybrid-proxy ", line)]


@pytest.mark.parametrize("columns", [70, 80, 120])
def test_commands_stand_in_groups_and_are_one_table(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = cli.parser().format_help().partition("COMMAND\n")[2].partition("\nstart here:")[0]
    headings = re.findall(r"^  ([a-z ]+):$", table, re.MULTILINE)
    assert headings == ["serve", "look at the node", "find out why", "other"]
    beside = re.findall(r"^( {4}([a-z]+) +)\S", table, re.MULTILINE)
    assert [name for _, name in beside] == list(cli.entries())
    assert len({len(first) for first, _ in beside}) == 1


def test_help_begins_with_what_needs_no_file_that_an_installation_lacks() -> None:
    begin = cli.parser().format_help().partition("start here:\n")[2].partition("\n\n")[0]
    assert len(_commands(begin)) == 4
    assert "./" not in begin


def test_a_demonstration_has_a_lab_of_its_own() -> None:
    names = {action: cli.parser().parse_args(["lab", action]).name for action in ("up", "down", "demo")}
    assert names == {"up": "lab", "down": "lab", "demo": "demo"}


def test_the_help_of_run_has_first_what_most_nodes_need() -> None:
    sections = re.split(r"^(\S.*):$", cli.commands_of(cli.parser("run"))["run"].format_help(), flags=re.MULTILINE)
    flags = {
        name: re.findall(r"^  (?:-v N, )?(--[\w-]+)", text, re.MULTILINE)
        for name, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    first = [flag for name in list(flags)[1:4] for flag in flags[name]]
    assert {"--kubeconfig", "--manifests", "--hostname-override", "--cluster-cidr", "--proxy-mode"} <= {*first}
    assert len(first) < 20
    ours = [row.setting for row in rows() if row.setting.mode == "ebpf" and row.setting.flag]
    under = {flag[2:]: name for name in flags for flag in flags[name]}
    assert ours
    assert all(under[setting.flag].startswith("mode ebpf") for setting in ours)
    assert len(flags) > 10, "few sections, which nobody reads as a whole"


def test_the_help_of_top_explains_its_percentile() -> None:
    assert "99 got a first packet of their backend within `first p99`" in cli.entries()["top"].load().epilog.replace(
        "\n", " "
    )


def test_help_breaks_no_flag_and_no_address() -> None:
    words = {word for name in cli.entries() for word in cli.commands_of(cli.parser(name))[name].format_help().split()}
    assert not [word for word in words if re.fullmatch(r"[a-z./-]*[a-z]-", word)]


@pytest.mark.parametrize(
    "argv",
    [["explain", "--from", "10.0.0.1"], ["top", "--interval", "0"], ["doctor", "-n", "a", "--to", "10.0.0.1:1"]],
    ids=" ".join,
)
def test_values_that_cannot_be_used_exit_with_2(argv: list[str]) -> None:
    assert cli.main(argv) == cli.USAGE


@pytest.mark.parametrize("command", ["services", "backends", "flows", "status", "drain"])
def test_without_an_agent_and_anything_programmed_the_exit_code_is_1(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_proxy.controller.commands.views.left_here", lambda *_: iter(()))
    assert cli.main([command, "--admin-socket", "/nowhere/agent.sock"]) == cli.FAILED
    shown = capsys.readouterr()
    assert "no agent" in shown.out + shown.err or "nothing is programmed" in shown.err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == cli.OK
    assert capsys.readouterr().out == f"hybrid-proxy {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == cli.OK
    assert "_ARGCOMPLETE" in capsys.readouterr().out


def test_every_flag_has_a_place_in_a_page_and_a_reader() -> None:
    """What sets a setting has its reader in test_configfile.py; a flag without help is one that kube-proxy had."""
    root = Path(__file__).parents[2]
    pages = "".join((root / "docs" / name).read_text() for name in ("hybrid-proxy.8", "configuration.md"))
    known = set(re.findall(r"(?<![\w-])--?\w[\w-]*", re.sub(r"\\f[BIR]|\\(?=-)", "", pages)))
    code = "".join(path.read_text() for part in ("controller", "workshop") for path in (root / part).rglob("*.py"))
    read = set(re.findall(r"\b(?:args|arguments|flags|typed)\.(\w+)|\"(\w+)\"", code))
    read_names = {name for each in read for name in each} | {row.dest for row in rows()}
    commands = [cli.commands_of(cli.parser(name))[name] for name in cli.entries()]
    actions = [action for command in commands for action in cli.commands_of(command).values()]
    for command in commands + actions:
        for action in command._actions:  # noqa: SLF001
            if action.help != argparse.SUPPRESS and action.dest not in ("help", "all_namespaces"):  # no reader needed
                assert not action.option_strings or known & set(action.option_strings), command.prog
                assert action.dest in read_names, f"{command.prog}: {action.dest}"


def test_explain_live_says_of_a_mode_that_runs_no_probe_what_is_not_programmed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The service table has it all the same; mode ebpf answers so, too."""
    missed = Unprogrammed("default/web:http", "no room")
    verdict = Verdict("", "dnat", "It is served.", backends=("10.0.0.1:80",), service=missed.entry)

    def ask(_: str, request: Any, *__: Any) -> Any:
        match request:
            case p.GetNames():
                return p.NamesAnswer("nftables", [], None, {}, [])
            case p.GetStatus():
                return SimpleNamespace(status=SimpleNamespace(dataplane=SimpleNamespace(unprogrammed=[missed])))
            case p.GetTable():
                return p.TableAnswer([], [verdict], [])
        raise ControllerError("mode nftables cannot be asked about a packet")

    monkeypatch.setattr("hybrid_proxy.controller.commands.inspect.ask", ask)
    socket = str(tmp_path / "admin.sock")
    asked = ["--from", "10.0.0.9", "--to", "10.96.0.1:80", "--admin-socket", socket, "-o", "json"]
    assert cli.main(["explain", "--live", *asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["verdict"], answer["backends"], answer["service"]) == ("untouched", [], None)
    assert answer["reason"] == "Not programmed: default/web:http: no room."
