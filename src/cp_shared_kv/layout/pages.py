"""Kinds of ids. A logical id where a physical one is wanted is a type error, not a wrong answer.

The types exist for the type checker alone: at run time each is a plain int64 array. Wrap an
array where its kind becomes known, `LogicalPages(pages)`, and pass it on unwrapped.
"""

from __future__ import annotations

from typing import NewType

import numpy as np
import numpy.typing as npt

LogicalPages = NewType("LogicalPages", npt.NDArray[np.int64])
"""Page ids in the group's pooled space, 1..N*P; 0 is the padding page and has no owner."""

PhysicalPages = NewType("PhysicalPages", npt.NDArray[np.int64])
"""Page ids in one rank's own buffers, 1..P; 0 is that rank's padding page."""

LogicalLocs = NewType("LogicalLocs", npt.NDArray[np.int64])
"""Token slots in the pooled space: logical page * page_size + offset in the page."""

PhysicalLocs = NewType("PhysicalLocs", npt.NDArray[np.int64])
"""Token slots in one rank's own buffers: physical page * page_size + offset in the page."""

Positions = NewType("Positions", npt.NDArray[np.int64])
"""Indices of pages within one request, counted from 0."""
