"""`status`, `modes`, listings and `explain --live`: what is programmed in the kernel, and what the agent knows."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from hybrid_proxy.controller.commands import command as c
from hybrid_proxy.controller.commands import listings, terminal
from hybrid_proxy.controller.commands.columns import Column
from hybrid_proxy.controller.commands.explain import lines, sentences
from hybrid_proxy.controller.commands.listings import Change, ModeRow, changes
from hybrid_proxy.controller.commands.names import UnknownName
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.semantics.explain import Packet, Verdict, left_text
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.serving.admin import FIRST_SECONDS, NoAgentError, StartingError, UnansweredError, ask
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.links import read_node
from hybrid_proxy.dataplane.mode import Options, ProbePacket
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.dataplane.reports import SENT_ON, ExplainAnswer, ExplainStep, FlowRow, Unprogrammed, some, unserved
from hybrid_proxy.dataplane.table import NODE_PORT, Protocol, family_of, host_of, socket_text

if TYPE_CHECKING:
    from hybrid_proxy.controller.commands.views import Programmed

RELAY: Final = "relay of mode userspace"
SHOWN_FLOWS: Final = 3  # of a mode that drains
MOST_FLOWS: Final = 10_000  # of which these are looked for
TRIES: Final = "`hybrid-proxy doctor NAMESPACE/NAME` tries one to each"
WATCH_SECONDS: Final = 1.0


def _list(read: _Read, args: argparse.Namespace) -> int:
    """Print one of the listings; the exit code."""
    if args.watch:
        return _watch(args, read)
    found = _read(args, read)
    terminal.print_rows(args, found.columns, found.rows)
    for note in found.notes if args.output in ("text", "wide") else ():
        terminal.remark(f"({note})")
    return 0


class _Found(NamedTuple):
    """The rows that were read on the node, with their columns."""

    rows: Sequence[Any]
    columns: Sequence[Column[Any]]
    notes: Sequence[str] = ()


_Read = Callable[["Programmed", argparse.Namespace], _Found]


def _read(args: argparse.Namespace, read: _Read) -> _Found:
    from hybrid_proxy.controller.commands.views import programmed

    draining, endpoints = args.command == "flows", args.command == "backends"
    with contextlib.closing(
        programmed(args.admin_socket, args.pin_root, draining=draining, endpoints=endpoints)
    ) as here:
        found = read(here, args)
    return found._replace(notes=[here.note, *found.notes]) if here.note else found


def _services(here: Programmed, args: argparse.Namespace) -> _Found:
    known = here.services()
    asked = here.asked(args.service, args.namespace, known)
    rows = [row for row in known if asked.has(row.name)]
    names = {(row.name or "").partition(":")[0] for row in rows}
    left = here.agent.left_to_node if here.agent else {}
    notes = [left_text(address, owner) for address, owner in left.items() if owner in names or not any(asked)]
    if here.agent and any(text.startswith(NODE_PORT) for row in rows for text in row.frontends):
        notes.append(f"node ports are served at {some(here.agent.node_ports_at) or 'no address'}")
    notes += [f"not programmed: {each}" for each in here.agent.unprogrammed] if here.agent and not any(asked) else []
    problems = here.agent.problems if here.agent and any(asked) else []
    notes += [each.report for each in problems if each.service and asked.of(each.service)]
    return _Found(rows, listings.service_columns(rows, here.agent.ejections if here.agent else ()), notes)


def _backends(here: Programmed, args: argparse.Namespace) -> _Found:
    asked = here.asked(args.service, args.namespace)
    rows = [row for row in here.backends(asked.service if here.agent else None) if asked.has(row.service)]
    states = {(row.service, row.address): row.state for row in here.agent.ejections} if here.agent else {}
    ends = {
        (service, end.address): end
        for service, those in (here.agent.endpoints if here.agent else {}).items() if asked.of(service) for end in those
    }  # fmt: skip
    unready = {of: end for of, end in ends.items() if not end.ready}
    for row in rows:  # the agent knows until when one is ejected, and why
        row.state = states.get((row.service or "", row.address), row.state)
        of = (row.service or "").partition(":")[0], host_of(row.address)
        row.node = ends[of].node if of in ends else None
        if (out := unready.pop(of, None)) and not row.used:
            row.state = f"in no backend set: it is {'terminating' if out.terminating else 'not ready'}"
    rows.sort(key=lambda row: (row.service or "", row.address.startswith("["), row.address))
    blind = sorted({row.mode for row in rows if row.failures is None})
    notes = [f"mode {mode} does not see whether connections to backends fail; {TRIES}" for mode in blind]
    if away := [f"{address} of {service}" for service, address in sorted(unready)]:
        notes.insert(0, f"not ready: {some(away)}")
    return _Found(rows, listings.backend_columns(rows), notes)


def _flows(here: Programmed, args: argparse.Namespace) -> _Found:
    from hybrid_proxy.controller.commands.views import ALL

    asked = here.asked(args.service, args.namespace)
    rows, total = here.flows(ALL if any(asked) else args.limit, args.mode)
    rows = [row for row in rows if asked.has(row.service)]
    total = len(rows) if any(asked) else total
    notes = [f"{args.limit} of {total} flows; --limit shows more"] if total > args.limit else []
    if closed := sum(row.state == "closed" for row in rows[: args.limit]):
        notes.append(f"{closed} of these {'is' if closed == 1 else 'are'} closed, and listed last until forgotten")
    rows = rows[: args.limit]
    here.note_gone(rows)
    # The relay of mode userspace, which served before, alone knew the backend of a flow that leads to it.
    own = {"127.0.0.1", "::1", *read_node().addresses}
    at_node = [row for row in rows if row.backend and host_of(row.backend) in own]
    known = {row.address for row in here.backends()} if at_node else set()
    for row in at_node:
        row.backend = row.backend if row.backend in known else RELAY
    return _Found(rows, listings.flow_columns(rows), notes)


def _watch(args: argparse.Namespace, read: _Read) -> int:
    """Print all rows, then each one that comes, changes or goes, until Ctrl-C."""
    first = _read(args, read)
    start = [Change("added", row, time.time()) for row in first.rows]
    likely = [*start, *(msgspec.structs.replace(one, what="-" * 40) for one in start[-1:])]

    def followed() -> Iterator[Change[Any]]:
        yield from start
        before, used = first, time.process_time()
        while True:
            time.sleep(max(WATCH_SECONDS, 9 * (time.process_time() - used)))  # a tenth of a processor at most
            used = time.process_time()
            try:
                now = _read(args, read)
            except UnknownName:  # a service that goes is gone, and may come again
                now = before._replace(rows=[])
            yield from changes(before.rows, now.rows, now.columns, time.time())
            before = now

    terminal.print_stream(args, listings.change_columns(first.columns), followed(), likely)
    return 0


def _show_modes(args: argparse.Namespace) -> int:
    """Which modes work here, and what each does."""
    from hybrid_proxy.controller.agent.modes import probe_all
    from hybrid_proxy.controller.commands.status import switched
    from hybrid_proxy.controller.commands.views import without_agent

    try:
        status = ask(args.admin_socket, p.GetStatus(), p.StatusAnswer, FIRST_SECONDS).status
        does = {**dict.fromkeys((one.mode for one in status.draining), "drains"), status.mode.effective: "serves"}
        note = switched(status)
    except UnansweredError as error:
        note, does = str(error), {}
        how = "serves without an agent" if isinstance(error, NoAgentError) else "serves as last programmed"
        try:
            left = without_agent(args.admin_socket, args.pin_root, error).programmed
            does = {mode: how if found.service_ports else "drains" for mode, found in left.items()}
        except (DataplaneError, OSError) as denied:
            note += f"; which mode serves is not known: {denied}"
    missing = probe_all(Options(ebpf=EbpfOptions(pin_root=args.pin_root or "")))
    does = {mode: "cannot work" if lacks else "works" for mode, lacks in missing.items()} | does
    rows = [
        ModeRow(mode, not lacks, does[mode].startswith("serves"), lacks, does[mode]) for mode, lacks in missing.items()
    ]
    terminal.print_rows(args, listings.mode_columns(), rows)
    if note:
        terminal.remark(f"({note})")
    return 0


def _show_status(args: argparse.Namespace) -> int:
    """The status; the exit code is 1 where no agent answers, and with --exit-code where the node is not in sync."""
    from hybrid_proxy.controller.commands import status as text
    from hybrid_proxy.controller.commands.troubles import Verdict
    from hybrid_proxy.controller.commands.views import agent_at, without_agent

    status = agent_at(args.admin_socket, args.pin_root).known()
    if isinstance(status, p.AgentStatus):
        with contextlib.suppress(ControllerError, DataplaneError, OSError):  # a mode may end while it is read
            status = _with_quiet_flows(args, status) if status.draining else status
            if status.starting:  # what serves until its first table
                error = StartingError(p.StartingAnswer(status.pid, status.starting, status.uptime_seconds))
                former = without_agent(args.admin_socket, args.pin_root, error)
                status = msgspec.structs.replace(status, former=former)
    if args.output in ("json", "yaml"):
        terminal.print_value(args.output, status)
    elif isinstance(status, p.AgentStatus):
        terminal.print_lines(text.lines(status, terminal.screen(), time.time(), wide=args.output == "wide"))
    else:
        terminal.print_lines(text.lines_without_agent(status, terminal.screen(), time.time()))
    if isinstance(status, p.AgentStatus):
        verdict = text.verdict(status)
        worse = verdict is Verdict.DEGRADED and args.exit_code == "degraded"
        return int(bool(args.exit_code) and (worse or verdict is Verdict.NOT_IN_SYNC))
    return 1


def _with_quiet_flows(args: argparse.Namespace, status: p.AgentStatus) -> p.AgentStatus:
    """What somebody who waits for the end of a mode may close."""
    from hybrid_proxy.controller.commands.views import ALL, programmed

    draining = []
    with contextlib.closing(programmed(args.admin_socket, args.pin_root, draining=True)) as here:
        for left in status.draining:
            few = sum(left.flows.values()) <= MOST_FLOWS
            rows = [row for row in here.flows(ALL, left.mode)[0] if row.state != "closed"] if few else []
            draining.append(msgspec.structs.replace(left, quiet=rows[:SHOWN_FLOWS]))
    return msgspec.structs.replace(status, draining=draining)


def explain_live(args: argparse.Namespace, packets: list[Packet]) -> int:
    """Ask the loaded program, through the agent."""
    from hybrid_proxy.controller.commands.doctor.way import astray
    from hybrid_proxy.controller.commands.views import remembered
    from hybrid_proxy.dataplane.kernel import namespaces

    for each in packets:
        if family_of(each.src) != family_of(each.dst):
            raise ControllerError(f"{each.src} and {each.dst} are of different address families")
    pods: list[namespaces.Pod] = []
    with contextlib.suppress(OSError, DataplaneError):  # without the rights, routes tell where pods are
        pods += namespaces.pods()
    at = {address: pod.interface for pod in pods for address in pod.addresses}
    probes = [
        ProbePacket(each.src, each.dst, each.port, Protocol[each.protocol.upper()], each.source_class, args.source_port)
        for each in packets
    ]
    probes = [msgspec.structs.replace(each, interface=at.get(each.src, "")) for each in probes]
    try:
        agent = ask(args.admin_socket, p.GetNames(), p.NamesAnswer)
    except StartingError as error:
        agent = p.NamesAnswer("", [], None, {}, [])
        terminal.remark(f"({error}; this is what the agent before it left)")
    known = _flows_of_drained(args, packets, agent)
    asked = [probe for packet, probe in zip(packets, probes, strict=True) if packet not in known]
    try:
        answers = iter(ask(args.admin_socket, p.RunExplain(asked), p.ExplainAnswers).answers if asked else ())
    except UnansweredError:
        raise
    except ControllerError as error:
        terminal.remark(f"({error}: the agent's service table answers)")
        rest = [packet for packet in packets if packet not in known]
        missed = ask(args.admin_socket, p.GetStatus(), p.StatusAnswer).status.dataplane.unprogrammed
        by_table = ask(args.admin_socket, p.GetTable(None, rest), p.TableAnswer).verdicts
        answers = (_by_table(each, [one for one in missed if one.entry == each.service]) for each in by_table)
    rows = [_as_drained(known[packet], agent) if packet in known else next(answers) for packet in packets]
    for packet, row in zip(packets, rows, strict=True):
        row.name, row.mode = packet.name, row.mode or agent.mode
        if row.service and not args.flows:
            ends = {host: host in at for host in (host_of(end) for end in row.backends)}
            wrong = astray(ends, {packet.src}, {packet.dst}, pods, (here := read_node()), ())
            row.steps += [ExplainStep("way", f"The way to {end} is wrong: {why}.") for end, (why, _) in wrong.items()]
            row.steps += _met(packet, row, here.addresses)
            out = [each.address for each in agent.ejections if each.ejected and each.service == row.service]
            row.steps += [ExplainStep("ejected", f"Ejected, and not chosen: {some(out)}.")] * bool(out)
        if not (row.service or args.flows) and (was := remembered(args.admin_socket, packet.dst)):
            terminal.remark(f"note: {packet.dst} is not served{was}")
    if args.output == "json":
        terminal.print_value(args.output, rows if args.flows else rows[0])
        return 0
    for packet, row in zip(packets, rows, strict=True):
        steps = [step.text for step in row.steps if args.verbose or not step.internal]
        if agent.draining and row.mode == agent.mode:
            stay = f"flows that {' and '.join(agent.draining)} has stay there (--source-port says which one is meant)"
            steps.append(f"mode:     {row.mode}; {stay}")
        terminal.say(*lines(packet, row, steps))
    return 0


def _met(packet: Packet, row: ExplainAnswer, own: Sequence[str]) -> Iterator[ExplainStep]:
    """Rules of other programs that take the packet, by what they say or by default: behind a translation or before."""
    from hybrid_proxy.controller.commands.doctor.facts import WITHOUT_FORWARD
    from hybrid_proxy.controller.commands.doctor.rules import BEFORE
    from hybrid_proxy.dataplane.firewall_rules import FIELDS, takes
    from hybrid_proxy.dataplane.kernel.foreign_rules import read_rules
    from hybrid_proxy.dataplane.kernel.links import interface_to

    relayed, hook = row.mode in WITHOUT_FORWARD, "output" if packet.src in own else "forward"
    first = {hook} if hook == "output" else BEFORE if relayed else BEFORE - {"input"}
    translated = "" if row.masquerade and row.mode == "ebpf" else packet.src  # other modes masquerade after FORWARD
    came, early = "" if packet.src in own else interface_to(packet.src), list[str]()
    for rule in read_rules(client=packet.src)[0]:
        before = row.mode not in ("ebpf", "") and not rule.late and not first.isdisjoint(rule.hooks)
        after = hook in rule.hooks and not (before or rule.away or rule.spares or relayed or SENT_ON in row.reason)
        source, ends = (packet.src, [socket_text(packet.dst, packet.port)]) if before else (translated, row.backends)
        known = ((source, "", *end.rpartition(":")[::2], packet.protocol.lower()) for end in ends)
        met = [dict(zip(FIELDS, each, strict=True)) | {"daddr": each[2].strip("[]")} for each in known]
        met = [at | {"state": "new", "iifname": came, "oifname": interface_to(at["daddr"]) * after} for at in met]
        if (before or after) and (rule.text.lower() == "policy drop" or any(takes(rule.text, each) for each in met)):
            early += [str(rule)] * before
            if after:
                yield ExplainStep("firewall", f"In the stack it meets {rule}, unless a rule before it accepts it.")
    if early:
        text = "This answer is by the service table alone; before that the packet meets rules of other programs"
        yield ExplainStep("firewall", f"{text}, unless one before them accepts it: {some(early, '; ')}.")


def _by_table(verdict: Verdict, missed: Sequence[Unprogrammed]) -> ExplainAnswer:
    if missed:
        verdict = Verdict(verdict.name, "untouched", f"Not programmed: {unserved(missed)[0]}.")
    steps = [ExplainStep("table", text) for text in sentences(verdict)]
    facts = {name: getattr(verdict, name) for name in ("verdict", "masquerade", "service", "reason")}
    return ExplainAnswer(backends=list(verdict.backends), steps=steps, **facts)


def _flows_of_drained(args: argparse.Namespace, packets: list[Packet], agent: p.NamesAnswer) -> dict[Packet, FlowRow]:
    """The flows that packets belong to, of modes that drain."""
    if not agent.draining or not args.source_port:
        return {}
    from hybrid_proxy.controller.commands.views import ALL, programmed

    with contextlib.closing(programmed(args.admin_socket, draining=True)) as here:
        rows = [row for mode in agent.draining for row in here.flows(ALL, mode)[0] if row.state != "closed"]
    flows = {(row.protocol, row.client, row.frontend): row for row in rows}
    found = {}
    for packet in packets:
        client, frontend = socket_text(packet.src, args.source_port), socket_text(packet.dst, packet.port)
        if (flow := flows.get((packet.protocol.upper(), client, frontend))) is not None:
            found[packet] = flow
    return found


def _as_drained(flow: FlowRow, agent: p.NamesAnswer) -> ExplainAnswer:
    text = f"Mode {flow.mode}, which drains, has this flow until it is over. New ones go to mode {agent.mode}."
    return ExplainAnswer(
        mode=flow.mode,
        verdict="dnat",
        backends=[flow.backend] if flow.backend else [],
        masquerade=flow.source != flow.client,
        service=flow.service,
        reason=text,
        steps=[ExplainStep("flow", text)],
    )


# The command line

_STATUS: Final = """
The first line is a verdict: OK, DRAINED (health checks fail on purpose), DEGRADED (the node serves what the cluster
has, but something is wrong), or NOT IN SYNC. The lines below say what is wrong, then what serves.

examples:
  hybrid-proxy status              a verdict, what is wrong, the mode and its hooks
  hybrid-proxy status -o wide      the same, all counters in words, how full each table is, and its memory
  hybrid-proxy status --exit-code  for scripts: exit code 1 if the node is not in sync
  hybrid-proxy status -o json
"""

_MODES: Final = """
The command tries out what each mode needs: privileges, kernel features, tools. It leaves nothing behind.

examples:
  hybrid-proxy modes               which modes work on this node, what the others lack, and which one runs
  hybrid-proxy modes -o json
"""

_SERVICES: Final = """
examples:
  hybrid-proxy services                    every programmed service port, with its frontends
  hybrid-proxy services default/web -o wide
  hybrid-proxy services -n kube-system --watch
  hybrid-proxy services -o json
"""

_BACKENDS: Final = """
examples:
  hybrid-proxy backends                    every backend, whether it serves, and why not
  hybrid-proxy backends default/web --watch
  hybrid-proxy backends default/web -o json
"""

_FLOWS: Final = """
examples:
  hybrid-proxy flows                       which client uses which backend through which service
  hybrid-proxy flows default/web --limit 20
  hybrid-proxy flows --mode ebpf           what a mode that drains still has; idle for longest first
  hybrid-proxy flows -o json
"""


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    c.add_admin(parser)
    c.add_folders(parser)
    c.add_table(parser)


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    text = "exit with 1 if the verdict is NOT IN SYNC, also while the agent starts, or, with `degraded`, DEGRADED"
    choices = ("not-in-sync", "degraded")
    parser.add_argument("--exit-code", nargs="?", const=choices[0], choices=choices, help=text)
    _common_arguments(parser)


def _listing_arguments(parser: argparse.ArgumentParser) -> None:
    c.add_service(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="then print each row that comes, changes or goes")
    _common_arguments(parser)


def _flows_arguments(parser: argparse.ArgumentParser) -> None:
    _listing_arguments(parser)
    parser.add_argument("--limit", type=c.number_from(1), default=1000, metavar="N", help="at most N (default: 1000)")
    text = "only those of this mode, serving or draining"
    parser.add_argument("--mode", choices=available_modes(), metavar="MODE", help=text)


STATUS: Final = c.Command(_status_arguments, _show_status, _STATUS)
MODES: Final = c.Command(_common_arguments, _show_modes, _MODES)
SERVICES: Final = c.Command(_listing_arguments, partial(_list, _services), _SERVICES)
BACKENDS: Final = c.Command(_listing_arguments, partial(_list, _backends), _BACKENDS)
FLOWS: Final = c.Command(_flows_arguments, partial(_list, _flows), _FLOWS)
