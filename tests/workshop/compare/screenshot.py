"""The picture in docs/compare.md, of the top of a report and its table:

python -m tests.workshop.compare.screenshot REPORT.html docs/compare.png
"""

from __future__ import annotations

import struct
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

from tests.workshop.compare.browser import browser

WIDTH = 1000
# One plot and the table, unfolded, both with costs and the agent's figures alone.
LEAVE = """
document.querySelectorAll(`#forest .plot:not(:first-child), .item:nth-of-type(n + 5), #forest .soft, #rest .plot,
    #rest details:not(.size), #rest ~ *`).forEach(one => one.remove());
document.querySelectorAll('tbody tr:nth-child(n + 5)').forEach(
    one => /change|start|memory/.test(one.textContent) || one.remove());
document.querySelectorAll('.panels').forEach(one => one.style.columns = 1);
document.querySelectorAll('details').forEach(one => one.replaceWith(one.querySelector('.scroll')));
"""


def indexed(png: bytes) -> bytes:
    """The same picture, 8 bits for each of 3 colours, with its 256 most frequent colours: a third of the size."""
    parts, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind = png[at + 4 : at + 8]
        parts[kind] = parts.get(kind, b"") + png[at + 8 : at + 8 + length]
        at += length + 12
    width, height, depth, colours = struct.unpack_from(">IIBB", parts[b"IHDR"])
    assert (depth, colours) == (8, 2), "not what the browser makes"
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    above, rows = [0] * 3 * width, []
    for kind, *line in lines.tolist():
        for n, value in enumerate(line):
            left, corner = (line[n - 3], above[n - 3]) if n >= 3 else (0, 0)
            near = min((left, above[n], corner), key=lambda each: abs(left + above[n] - corner - each))
            line[n] = (value + (0, left, above[n], (left + above[n]) // 2, near)[kind]) % 256
        rows.append(above := line)
    every, places, counts = np.unique(np.array(rows).reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    palette = every[np.argsort(counts)[-256:]]
    nearest = np.array([((palette - colour) ** 2).sum(axis=1).argmin() for colour in every], np.uint8)
    pixels = np.insert(nearest[places].reshape(height, width), 0, 0, axis=1)  # each line begins with its filter: none
    made = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": palette.astype(np.uint8).tobytes(), b"IDAT": zlib.compress(pixels.tobytes(), 9), b"IEND": b"",
    }  # fmt: skip
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in made.items()
    )
    return png[:8] + b"".join(chunks)


def main(report: Path, picture: Path) -> None:
    """Take the picture."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as window:
        window.open(report.absolute())
        window.look(WIDTH)
        window.value(LEAVE)
        window.look(WIDTH)  # at what is left
        window.picture(picture)
    picture.write_bytes(indexed(picture.read_bytes()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
