"""The child that draws: Vega-Lite declarations come in on stdin, SVG goes out on stdout, a JSON
line each.

V8, which draws, ends its whole process where memory is refused to it (`ulimit -v`, usual on shared
nodes), so it never lives in a shell's or a notebook's own process. Run by its path: it imports
nothing of workbench.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Answer {"spec", "version"} with {"svg"} or {"error"} until stdin ends, which it does when the
    caller dies.
    """
    import vl_convert

    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            answer = {"svg": vl_convert.vegalite_to_svg(asked["spec"], vl_version=asked["version"])}
        except Exception as error:  # vl_convert raises what V8 says, whatever it is
            answer = {"error": str(error).strip().partition("\n")[0]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
