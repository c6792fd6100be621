"""docs/configuration.md and the JSON schema, made of the types in `controller.settings.documents`: `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from controller.settings.config import reopening_settings
from controller.settings.documents import HYBRID, KUBE_PROXY, HybridProxyConfiguration, Row, rows

__all__ = ["FILES", "page", "schema"]

_PAGE: Final = """# Configuration

<!-- Made by `make docs` of controller/settings/documents.py and controller/settings/reference.py: change those. -->

`hybrid-proxy run` is configured by flags, or by a file:

```
hybrid-proxy run --config /var/lib/kube-proxy/config.conf --hostname-override node-1
```

The file is kube-proxy's, as it is: a `KubeProxyConfiguration`. What kube-proxy has no word for stands in a second
document of the same file, a `HybridProxyConfiguration`; either may be missing. Without them, and without flags, the
best mode that works on the node serves, with kube-proxy's defaults.

```yaml
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: 10.244.0.0/16
---
apiVersion: hybrid-proxy.io/v1alpha1
kind: HybridProxyConfiguration
mode: ebpf
```

- **An error** names file, field and value. All are told at once, and nothing is touched before all of it is good:
  `config.conf: KubeProxyConfiguration.iptables.masqueradeBit '32': is not a whole number from 0 to 31`.
- **A field that kube-proxy does not know** is told and left out, as kube-proxy does it, so that a file of another
  version works. In `HybridProxyConfiguration` it is an error.
- **A field without an effect here** is told when its value asks for something; the reason is below, and in
  `hybrid-proxy status`.
- **`mode`**: `HybridProxyConfiguration.mode` wins over `KubeProxyConfiguration.mode`. Where both are empty it is
  `auto`, the best that works here; a `mode: iptables` that a cluster was given is kept until ours says otherwise.
- **Flags beside a file**: kube-proxy's are ignored and told, as kube-proxy does it, but for `--hostname-override`,
  `--master`, `--cleanup`, `--init-only`, `--write-config-to` and those of the log. Flags that kube-proxy does not
  have count over the file.
- **`--write-config-to FILE`** writes what all of this comes to, both documents in full, and ends.
  `HybridProxyConfiguration` has a [JSON schema](hybrid-proxy-configuration.schema.json) for editors.

## A file that changes

The agent watches the file, also through the symbolic links of a ConfigMap's volume. kube-proxy ends when its file
changes; here what can be applied is applied. Fields marked *at once* are: what a Service means goes into the next
table, of which only what differs is programmed. Those marked *reopens* are wired into programs and rules: the mode
takes over from itself, or from another one, as a new agent would. What is programmed serves until the next has
adopted or replaced it; changes of Services wait for that, which takes seconds in mode `ebpf`. Fields marked
*restart* wait for the next start of the agent, and the log and `status` name them. A file that cannot be used, or a
mode that cannot serve, is told there too, and the configuration before stays.

## What is done to the node

When its mode serves, the agent sets what kube-proxy sets: its `oom_score_adj`, and the kernel's connection tracking as
`conntrack` says, in every mode, if it is loaded. `nf_conntrack_max` and the size of its table are set in the
machine's own network namespace alone. kube-proxy ends when one of these cannot be set; here it is told. `cleanup` puts
connection tracking back ([operations.md](operations.md#removing)).
"""

_COLUMNS: Final = "| field | default | flag | what it does | a change |\n|---|---|---|---|---|\n"


def page() -> str:
    """docs/configuration.md."""
    parts = [
        _PAGE,
        f"\n## {KUBE_PROXY}\n\n`apiVersion: kubeproxy.config.k8s.io/v1alpha1`, with the fields of Kubernetes 1.36.\n\n",
        _table(KUBE_PROXY),
        f"\n## {HYBRID}\n\n`apiVersion: hybrid-proxy.io/v1alpha1`. Below `ebpf`: of mode ebpf alone.\n\n",
        _table(HYBRID),
    ]
    return "".join(parts)


def _change(row: Row) -> str:
    """When a change takes effect."""
    if row.setting.unused:
        return ""
    return "restart" if row.setting.restart else "reopens" if row.name in reopening_settings() else "at once"


def _table(document: str) -> str:
    return _COLUMNS + "".join(f"{line}\n" for line in _lines(document))


def _lines(document: str) -> Iterator[str]:
    for row in rows():
        if row.document == document:
            setting = row.setting
            what = f"*Has no effect: {setting.unused}.*" if setting.unused else f"{row.text}."
            flag = "" if not setting.flag else f"`-{'-' if len(setting.flag) > 1 else ''}{setting.flag}`"
            cells = [f"`{row.path}`", _default(row), flag, what, _change(row)]
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(row: Row) -> str:
    match row.default:
        case bool():
            return f"`{str(row.default).lower()}`"
        case "" | () | {}:
            return ""
        case _:
            return f"`{row.default}`"


def schema() -> dict[str, Any]:
    """The JSON schema of HybridProxyConfiguration (draft 2020-12)."""
    made = msgspec.json.schema(HybridProxyConfiguration)
    made["$defs"][HYBRID]["required"] = ["apiVersion", "kind"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _schema_text() -> str:
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


FILES: Final = {
    "docs/configuration.md": page,
    "docs/hybrid-proxy-configuration.schema.json": _schema_text,
}


def main(folder: Path) -> None:
    """Write all of them below a folder."""
    for name, make in FILES.items():
        (folder / name).write_text(make())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
