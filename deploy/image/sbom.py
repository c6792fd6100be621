"""Writes the SBOM of the image that it runs in, as CycloneDX: Debian's packages by dpkg, Python's by their metadata."""

import json
import platform
import subprocess
from importlib.metadata import distributions
from typing import Any
from urllib.parse import quote

FIELDS = ("binary:Package", "Version", "Architecture", "source:Package", "source:Version")


def component(purl: str, name: str, version: str, kind: str = "library") -> dict[str, Any]:
    """One of the SBOM; its address is unique, and so its reference."""
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


def debian(distribution: str) -> list[dict[str, Any]]:
    """What dpkg has installed. Scanners look for holes by the name and the version of a package's source."""
    form = "${db:Status-Abbrev}\\t" + "\\t".join(f"${{{field}}}" for field in FIELDS) + "\\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", form], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = []
    for line in listed.splitlines():
        status, name, version, architecture, source, source_version = line.split("\t")
        if status[1] != "i":
            continue
        name = name.partition(":")[0]
        more = {"arch": architecture, "distro": distribution}
        if (source, source_version) != (name, version):
            more["upstream"] = f"{source}@{source_version}" if source_version != version else source
        qualifiers = "&".join(f"{key}={quote(value, safe='@')}" for key, value in more.items())
        purl = f"pkg:deb/{distribution.partition('-')[0]}/{quote(name)}@{quote(version)}?{qualifiers}"
        found.append(component(purl, name, version))
    return found


def python() -> list[dict[str, Any]]:
    """What the interpreter finds."""
    named = {each.name.lower().replace("_", "-").replace(".", "-"): each.version for each in distributions()}
    return [component(f"pkg:pypi/{name}@{quote(version)}", name, version) for name, version in named.items()]


def main() -> None:
    """Print it: without a time or a number of its own, so that two builds have the same."""
    release = platform.freedesktop_os_release()
    system, version = release["ID"], release.get("VERSION_ID", "")
    packages = debian(f"{system}-{version}") + python()
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": {"type": "container", "bom-ref": "image", "name": "hybrid-proxy"}},
        "components": [
            {"type": "operating-system", "bom-ref": "system", "name": system, "version": version},
            *sorted(packages, key=lambda package: str(package["purl"])),
        ],
    }
    print(json.dumps(bom, indent=1))


if __name__ == "__main__":
    main()
