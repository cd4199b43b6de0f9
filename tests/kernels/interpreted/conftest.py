"""Triton decides at import whether it interprets: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted`.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
