"""The commands in the documentation: fenced blocks and the lines in them."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGES", "ROOT", "Block", "anchors", "blocks", "commands", "documented", "table", "tree"]

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("controller", "dataplane", "workshop", "deploy", "vagrant", "tests")
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *(ROOT / "bpf").glob("*.md"),
        *(page for folder in FOLDERS for page in (ROOT / folder).rglob("README.md")),
    )
)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block: `words` of its first line (`sh`, `node`), its lines with continuations joined."""

    page: str
    words: tuple[str, ...]
    lines: tuple[str, ...]


def blocks(page: str, *words: str) -> Iterator[Block]:
    """The blocks of a page that begin with these words, or all."""
    for found in FENCE.finditer((ROOT / page).read_text()):
        info = tuple(found["info"].split())
        if info[: len(words)] == words:
            lines = re.sub(r"\\\n\s*", "", found["body"]).splitlines()
            yield Block(page, info, tuple(line for line in lines if line.strip() and not line.startswith("#")))


def tree(folder: Path) -> Path:
    """A folder to type commands in: it has `deploy` as the tree has, and deploy/README.md has made `../site` of it."""
    made = folder / "hybrid_proxy-0.1.0"  # as the source distribution unpacks
    made.mkdir()
    (made / "deploy").symlink_to(ROOT / "deploy")
    (block,) = (
        found["body"] for found in FENCE.finditer((ROOT / "deploy/README.md").read_text()) if found["info"] == "sh site"
    )
    subprocess.run(["sh", "-ec", block], cwd=made, check=True)
    return made


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """(page, argument list) of every command in a block of any page that starts with the program's name."""
    for page in PAGES:
        for block in blocks(page):
            if not block.words or block.words[0] in ("sh", "bash"):
                for line in block.lines:
                    if line.startswith(f"{program} "):
                        yield page, shlex.split(line, comments=True)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made by GitHub."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())}


def table(page: str, first: str) -> dict[str, dict[str, str]]:
    """The table whose heading begins so: title of a row -> heading of a column -> cell."""
    lines = (ROOT / page).read_text().partition(first)[2].splitlines()
    rows = [first + lines[0], *itertools.takewhile(lambda line: line.startswith("|"), lines[1:])]
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows]
    heading, _, *body = cells
    return {row[0]: dict(zip(heading[1:], row[1:], strict=True)) for row in body}


def documented() -> dict[str, tuple[str, set[str]]]:
    """The metrics of docs/metrics.md: name -> type and labels."""
    found: dict[str, tuple[str, set[str]]] = {}
    page, _, _ = (ROOT / "docs/metrics.md").read_text().partition("## Metrics of kube-proxy that are not here")
    for line in page.splitlines():
        row = re.match(r"\| `(\w+)` \| (\w+) \|([^|]*)\|(.*)\|$", line)
        if row:
            found[row[1]] = row[2], set(re.findall(r"`(\w+)`", row[3]))
    return found
