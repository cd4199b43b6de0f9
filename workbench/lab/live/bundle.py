"""Builds the one script that every board loads: our few files with Vega inside, so that nothing is
fetched.

`python -m workbench.lab.live.bundle` after a change under `js/`; a test holds that what is shipped
is what the sources give.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from workbench.lab.pictures.pictures import VEGA_LITE

HERE = Path(__file__).parent
PARTS = ("theme.js", "banner.js", "chart.js", "board.js")
"""Sources in order; each may use what stands before it."""
SHIPPED = HERE / "static" / "dashboard.js"


def source() -> str:
    """Our part of the script."""
    return "\n".join((HERE / "js" / name).read_text(encoding="utf-8") for name in PARTS)


def header() -> str:
    """First line of the bundle: names the source and the Vega-Lite version that it was built
    from.
    """
    return (
        f"// workbench board {hashlib.sha256(source().encode()).hexdigest()} vega-lite "
        f"{VEGA_LITE}\n"
    )


def build() -> str:
    """The whole script; offline, in about a second."""
    import vl_convert

    return header() + vl_convert.javascript_bundle(source(), vl_version=VEGA_LITE)


def is_current() -> bool:
    """Whether the shipped script was built from the present sources."""
    return SHIPPED.exists() and SHIPPED.open(encoding="utf-8").readline() == header()


def main() -> None:
    """Write the shipped script."""
    SHIPPED.parent.mkdir(exist_ok=True)
    SHIPPED.write_text(build(), encoding="utf-8")
    print(f"{SHIPPED.name}: {SHIPPED.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
