"""Writes the pages that are made from definitions, and the tree of docs/architecture.md: `make docs`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from hybrid_proxy.workshop import configuration, house, manual, output

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final[dict[str, Callable[[], str]]] = {
    "docs/configuration.md": configuration.page,
    "docs/hybrid-proxy-configuration.schema.json": configuration.schema_text,
    "deploy/helm/hybrid-proxy/values.schema.json": partial(
        configuration.values_text, ROOT / "deploy/helm/hybrid-proxy"
    ),
    "docs/output.md": output.page,
    "docs/hybrid-proxy.8": manual.page,
    "docs/architecture.md": partial(house.written, ROOT),
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())
