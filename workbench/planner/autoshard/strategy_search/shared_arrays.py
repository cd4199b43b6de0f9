"""Operations on arrays that are done once for the same operands: layers that are alike have the
same costs and tables, and what a search makes of them is the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class SharedArrays:
    """Results by operation and by the identity of its operands, which nobody may write to.

    Equal results are therefore one array, and operations on them are again done once.
    """

    def __init__(self) -> None:
        # Operands are kept, so that no other array gets their identity.
        self._known: dict[tuple[Any, ...], tuple[tuple[Array, ...], Any]] = {}

    def once(self, operation: Callable[..., Any], *operands: Array, fixed: Any = None) -> Any:
        """`operation(*operands)`, or with `fixed` as a last argument where it is given."""
        key = (operation, fixed, *map(id, operands))
        if key not in self._known:
            last = () if fixed is None else (fixed,)
            self._known[key] = operands, operation(*operands, *last)
        return self._known[key][1]
