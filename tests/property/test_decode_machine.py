"""A whole group without processes: real controller, real decode engine, two ranks' real sessions.

Messages travel encoded, in order on each link and in any order between links; answers to ranks
may be lost. Writes land late, break, or break and land all the same. The model knows which tokens
each page of both pools holds, so a page that is read too early, sent too late or reused too soon
shows at once.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cp_shared_kv.engine.request import Stage

from .decode_group import Group


class DecodeMachine(RuleBasedStateMachine):
    @initialize(
        physical_pages=st.integers(3, 5),
        decode_pages=st.integers(5, 14),
        promised_pages=st.sampled_from([0, 0, 2]),
        chunk_tokens=st.integers(2, 16),
        max_running=st.integers(1, 3),
    )
    def start(
        self,
        physical_pages: int,
        decode_pages: int,
        promised_pages: int,
        chunk_tokens: int,
        max_running: int,
    ) -> None:
        self.group = Group(physical_pages, decode_pages, promised_pages, chunk_tokens, max_running)

    # Links -----------------------------------------------------------------------------------

    @precondition(lambda self: self.group.waiting_links())
    @rule(data=st.data(), most=st.integers(1, 6))
    def one_link_moves(self, data: st.DataObject, most: int) -> None:
        link = data.draw(st.sampled_from(self.group.waiting_links()), label="link")
        for _ in range(min(most, len(self.group.links[link]))):
            self.group.deliver(*link)

    # Clients ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.group.unanswered()) < 6)
    @rule(
        prefix=st.integers(0, 24),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 6),
        ignore_eos=st.booleans(),
    )
    def submit(self, prefix: int, tail: list[int], max_tokens: int, ignore_eos: bool) -> None:
        prompt = (*[1] * prefix, *tail)
        self.group.submit(prompt, max_tokens, ignore_eos)

    @precondition(lambda self: self.group.unanswered())
    @rule(data=st.data(), where=st.sampled_from([*Stage, None]))
    def cancel(self, data: st.DataObject, where: Stage | None) -> None:
        """A client goes away whose request is in this stage at prefill, or decode's alone."""
        stages = {r.room: r.stage for r in self.group.controller.scheduler.requests()}
        there = [room for room in self.group.unanswered() if stages.get(room) is where]
        if there:
            room = data.draw(st.sampled_from(there), label="room")
            self.group.cancel(room)

    # Steps -----------------------------------------------------------------------------------

    @rule(rounds=st.integers(1, 6), writes_land=st.booleans())
    def everyone_works(self, rounds: int, writes_land: bool) -> None:
        for _ in range(rounds):
            self.group.all_links_move()
            self.group.controller.step()
            if writes_land:
                self.group.all_writes_land()
            if self.group.decode.has_work:
                self.group.decode.step()

    @rule(data=st.data())
    def someone_works(self, data: st.DataObject) -> None:
        what = data.draw(st.sampled_from(["prefill", "decode", "writes"]), label="what")
        if what == "prefill":
            self.group.controller.step()
        elif what == "writes":
            self.group.all_writes_land()
        elif self.group.decode.has_work:
            self.group.decode.step()

    # Writes ----------------------------------------------------------------------------------

    @precondition(lambda self: self.group.writes())
    @rule(data=st.data())
    def a_write_lands(self, data: st.DataObject) -> None:
        writes = self.group.writes()
        rank, write = writes[data.draw(st.integers(0, len(writes) - 1), label="write")]
        rank.land(write)

    @precondition(lambda self: self.group.writes(stray=False))
    @rule(data=st.data(), quiescent=st.booleans())
    def a_write_breaks(self, data: st.DataObject, quiescent: bool) -> None:
        writes = self.group.writes(stray=False)
        rank, write = writes[data.draw(st.integers(0, len(writes) - 1), label="write")]
        rank.fail(write, quiescent)

    @precondition(lambda self: self.group.writes(stray=True))
    @rule()
    def failed_rooms_are_drained(self) -> None:
        self.group.failed_rooms_are_drained()

    @precondition(lambda self: any(rank.sessions for rank in self.group.ranks))
    @rule()
    def the_ranks_repeat_themselves(self) -> None:
        self.group.the_ranks_repeat_themselves()

    @precondition(lambda self: self.group.rank_links())
    @rule()
    def acknowledgements_are_lost(self) -> None:
        for link in self.group.rank_links():
            self.group.links[link].clear()

    # Always ----------------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        self.group.the_books_balance()

    def teardown(self) -> None:
        if hasattr(self, "group"):  # else it never began
            self.group.settle()


TestDecodeMachine = DecodeMachine.TestCase
TestDecodeMachine.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
