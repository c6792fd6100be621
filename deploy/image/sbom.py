"""Writes the SBOM of the image that it runs in, as CycloneDX: Debian's packages by dpkg, Python's by their metadata."""

import json
import platform
import re
import subprocess
from importlib.metadata import PackageMetadata, distributions
from pathlib import Path
from typing import NotRequired, TypedDict
from urllib.parse import quote

COPYRIGHTS = Path("/usr/share/doc")
# SPDX's names for Debian's, and for those of Python's classifiers. That of BSD does not say which one: Jinja has the
# text of three clauses.
SPDX = {
    "Expat": "MIT", "MIT License": "MIT", "Apache Software License": "Apache-2.0", "Apache-2": "Apache-2.0",
    "BSD License": "BSD-3-Clause", "BSD-3-clause": "BSD-3-Clause", "BSD-2-clause": "BSD-2-Clause", "zlib": "Zlib",
}  # fmt: skip
SPDX |= {name: name for name in (*SPDX.values(), "ISC", "X11", "curl", "FSFAP", "CC0-1.0", "BSL-1.0", "MPL-2.0")}
FIELDS = ("binary:Package", "Version", "Architecture", "source:Package", "source:Version")


class Licence(TypedDict, total=False):
    """CycloneDX's choice: a `license` by its `id` or its `name`, or an SPDX `expression`."""

    license: dict[str, str]
    expression: str


Component = TypedDict(
    "Component",
    {"type": str, "bom-ref": str, "name": str, "version": str, "purl": str, "licenses": NotRequired[list[Licence]]},
)


def component(purl: str, name: str, version: str, licences: list[Licence]) -> Component:
    """One of the SBOM; its address is unique, and so its reference."""
    made: Component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if licences:
        made["licenses"] = licences
    return made


def of_python(about: PackageMetadata) -> list[Licence]:
    """What a package of Python says of its licence."""
    if "License-Expression" in about:
        text = about["License-Expression"]
        one = re.fullmatch(r"(?!LicenseRef-)\S+", text)
        return [{"license": {"id": text}} if one else {"expression": text}]
    classified = [name for name in about.get_all("Classifier", []) if name.startswith("License :: ")]
    return [named(each.rpartition(" :: ")[2]) for each in classified or about.get_all("License", [])]


def of_debian(package: str) -> list[Licence]:
    """The licences in the copyright file of a package, if that is written for programs (DEP 5)."""
    file = COPYRIGHTS / package / "copyright"
    text = file.read_text(errors="replace") if file.exists() else ""
    found = re.findall(r"^License:[ \t]*(\S.*?)\s*$", text, re.MULTILINE) if text.startswith("Format:") else []
    return list({str(each): each for each in map(named, sorted(set(found)))}.values())  # Expat and MIT are one


def named(licence: str) -> Licence:
    """By SPDX's identifier where there is one, otherwise by the name that its package has for it."""
    if gnu := re.fullmatch(r"(AGPL-3|L?GPL-[23]|GPL-1|LGPL-2\.1)(?:\.0)?(\+?)", licence):
        name, later = gnu.groups()
        return {"license": {"id": f"{name}{'' if '.' in name else '.0'}-{'or-later' if later else 'only'}"}}
    return {"license": {"id": SPDX[licence]} if licence in SPDX else {"name": licence}}


def debian(distribution: str) -> list[Component]:
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
        found.append(component(purl, name, version, of_debian(name)))
    return found


def python() -> list[Component]:
    """What the interpreter finds."""
    known = {each.name.lower().replace("_", "-").replace(".", "-"): each for each in distributions()}
    return [
        component(f"pkg:pypi/{name}@{quote(each.version)}", name, each.version, of_python(each.metadata))
        for name, each in known.items()
    ]


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
            *sorted(packages, key=lambda package: package["purl"]),
        ],
    }
    print(json.dumps(bom, indent=1))


if __name__ == "__main__":
    main()
