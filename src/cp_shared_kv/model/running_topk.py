"""The best of scores that come piece by piece: exactly those that all at once would give."""

from __future__ import annotations

import torch

from cp_shared_kv.model.ops.interface import AttentionOps


class RunningTopK:
    """For each query of a block, the k best of the positions scored so far.

    Of equal scores the lowest position is taken, as `select_topk` does. So what a piece leaves out
    can never be among the best of all, and what it keeps is compared again.
    """

    def __init__(self, ops: AttentionOps, visible: torch.Tensor, k: int) -> None:
        """visible i64[n]: how many positions each query sees, 1 or more."""
        self._ops, self._visible, self._k = ops, visible, k
        self._positions: torch.Tensor | None = None
        self._scores = torch.empty(0)

    def add(self, start: int, scores: torch.Tensor, *, last: bool) -> None:
        """fp32[n, m] for the positions start..start+m-1, which follow those before; `last` if no
        query sees any further one."""
        stop = start + scores.shape[1]
        if self._positions is None:
            chosen = self._ops.select_topk(scores, self._visible.clamp(max=stop), self._k)
            self._positions = chosen
        else:
            here = torch.arange(start, stop, device=scores.device).expand(len(scores), -1)
            positions = torch.cat([self._positions, here], dim=1)
            scores = torch.cat([self._scores, scores], dim=1)
            # What a query does not see comes last: if it lacks any of the kept, then all of these.
            kept = self._visible.clamp(max=self._positions.shape[1])
            seen = kept + (self._visible.clamp(max=stop) - start).clamp(min=0)
            chosen = self._ops.select_topk(scores, seen, self._k)
            found = positions.gather(1, chosen.clamp(min=0))
            self._positions = torch.where(chosen < 0, -1, found)
        if not last:
            self._scores = scores.gather(1, chosen.clamp(min=0))

    @property
    def positions(self) -> torch.Tensor:
        """i64[n, min(k, m)]: ascending; a query that has seen fewer has all of them, then -1."""
        assert self._positions is not None, "nothing was added"
        return self._positions
