"""The demo as a moving picture: `make pictures` writes docs/demo.svg of a run on this machine.

The lines are those that the demo printed, and they come when it printed them; only a pause of more than a second and a
half is shortened. The picture is text that one CSS animation scrolls, so it needs no script and nothing from elsewhere,
and a viewer without animations shows the end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from hybrid_proxy.workshop.lab import demo

COLUMNS: Final = 120
ROWS: Final = 26
LINE: Final = 24.4  # rich's height of a line
LONGEST_PAUSE: Final = 1.5  # seconds
HELD: Final = 8.0  # seconds for which the end stays
# Filled in by rich, after the names with doubled braces were filled in here.
PICTURE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{width}} {height}" role="img">
<title>A recording of hybrid-proxy lab demo</title>
<style>
.{{unique_id}}-matrix {{{{ font: 20px "Fira Code", Menlo, Consolas, monospace; white-space: pre }}}}
{{styles}}
#screen {{{{ transform: translateY({end}px) }}}}
@media (prefers-reduced-motion: no-preference) {{{{
  #screen {{{{ animation: scroll {seconds:.1f}s step-end infinite }}}}
}}}}
@keyframes scroll {{{{ {frames} }}}}
</style>
<defs><clipPath id="window"><rect width="{{terminal_width}}" height="{window}"/></clipPath>{{lines}}</defs>
<rect width="{{width}}" height="{height}" rx="8" fill="#1b1f24"/>
<g transform="translate(16 16)" clip-path="url(#window)"><g id="screen">
{{backgrounds}}<g class="{{unique_id}}-matrix">{{matrix}}</g>
</g></g>
</svg>
"""


class Recorder(Console):
    """A console that notes when each line came."""

    def __init__(self) -> None:
        super().__init__(record=True, width=COLUMNS, highlight=False)
        self.moments: list[tuple[float, int]] = []  # seconds, lines so far

    def print(self, *objects: Any, **arguments: Any) -> None:
        super().print(*objects, **arguments)
        printed = self.export_text(clear=False).count("\n")
        self.moments.append((time.monotonic(), printed))

    def picture(self) -> str:
        now, frames, before = 0.0, [], self.moments[0][0]
        for at, printed in self.moments:
            now += min(at - before, LONGEST_PAUSE)
            before = at
            frames.append((now, f"{(ROWS - printed) * LINE:.1f}"))  # so that the newest line is the lowest
        seconds = now + HELD
        steps = " ".join(f"{100 * at / seconds:.2f}% {{{{ transform: translateY({y}px) }}}}" for at, y in frames)
        window = ROWS * LINE
        template = PICTURE.format(
            end=frames[-1][1], seconds=seconds, frames=steps, window=f"{window:.1f}", height=f"{window + 32:.1f}"
        )
        return self.export_svg(code_format=template, unique_id="demo")


def main(path: Path) -> int:
    """Run the demo, and write the picture if every check passed."""
    recorder = Recorder()
    code = demo.run(f"demo{os.getpid()}", 3, console=recorder)
    if code == 0:
        path.write_text(recorder.picture())
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
