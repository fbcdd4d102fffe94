"""Answers under way: by which names they can be ended, and when they have taken too long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing

from cp_shared_kv.server.access_log import RequestRecord
from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.choice_text import Piece
from cp_shared_kv.server.choices import Pieces


class AnswerEnd:
    """How one answer of so many choices may end before its last token: in time, or by an abort."""

    def __init__(self, choices: int, timeout_seconds: float | None, record: RequestRecord) -> None:
        self.deadline: float | None = None
        """On the event loop's clock."""
        self._choices = choices
        self._timeout_seconds = timeout_seconds
        self._record = record
        if timeout_seconds is not None:
            now = asyncio.get_running_loop().time()
            self.deadline = now + timeout_seconds - record.age_seconds
        self._aborted = False
        self._wait: asyncio.Timeout | None = None

    def abort(self) -> None:
        """End the answer where it is."""
        self._aborted = True
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    def too_late(self) -> ApiError:
        """What is said once the deadline has passed."""
        return ApiError(
            504,
            f"the answer was not complete within the request's timeout of "
            f"{self._timeout_seconds:g} s",
            param="timeout",
            code="timeout",
        )

    async def bound(self, pieces: Pieces) -> Pieces:
        """The same pieces. At an abort what is left of each choice is an end with reason `abort`;
        at the deadline `ApiError` 504 is raised. Either way all behind `pieces` is closed."""
        open_choices = set(range(self._choices))
        async with aclosing(pieces):
            while not self._aborted:
                try:
                    async with asyncio.timeout_at(self.deadline) as self._wait:
                        index, piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if self._aborted:
                        break
                    if self.deadline is None:
                        raise  # not ours
                    raise self.too_late() from None
                finally:
                    self._wait = None
                if piece.finish_reason is not None:
                    open_choices.discard(index)
                yield index, piece
        self._record.notes["finish_reason"] = "abort"
        for index in sorted(open_choices):
            yield index, Piece(finish_reason="abort")


class AnswersUnderWay:
    """Every answer that is being given, by the names that its client may know it by."""

    def __init__(self) -> None:
        self._ends: dict[str, list[AnswerEnd]] = {}

    async def watched(self, pieces: Pieces, end: AnswerEnd, names: Iterable[str]) -> Pieces:
        """The same pieces, which `abort` can end by any of `names` until they are closed."""
        listed = set(names)
        for name in listed:
            self._ends.setdefault(name, []).append(end)
        try:
            async with aclosing(end.bound(pieces)) as bound:
                async for piece in bound:
                    yield piece
        finally:
            for name in listed:
                self._ends[name].remove(end)
                if not self._ends[name]:
                    del self._ends[name]

    def abort(self, name: str) -> int:
        """End the answers of this name; returns how many there were."""
        ends = self._ends.get(name, [])
        for end in ends:
            end.abort()
        return len(ends)

    def abort_all(self) -> int:
        """End every answer; returns how many there were."""
        ends = {end for named in self._ends.values() for end in named}
        for end in ends:
            end.abort()
        return len(ends)
