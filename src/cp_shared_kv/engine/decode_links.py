"""A rank's links to decode workers, by the epoch of each. One to another host takes its time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import zmq

from cp_shared_kv.engine.codecs import RankToDecode
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.links import dealer, post
from cp_shared_kv.engine.off_host import is_lost, is_off_host
from cp_shared_kv.engine.side_calls import SideCalls
from cp_shared_kv.errors import ProtocolError

CONTACT_SECONDS = 5.0
"""How long a link to another host may take to stand."""

Link = zmq.Socket[bytes]
Answer = Callable[[str | None], None]


class DecodeLinks:
    """Every method is for the rank's thread. `calls` waits for links to other hosts; `wake` says,
    from any thread, that `collect` has something to do."""

    def __init__(
        self,
        identity: bytes,
        keys: ControlKeys | None,
        calls: SideCalls,
        wake: Callable[[], None],
    ) -> None:
        self._identity, self._keys = identity, keys
        self._calls, self._wake = calls, wake
        self._links: dict[int, Link] = {}
        self._making: dict[int, tuple[Future[Link], Answer]] = {}
        self._watched: set[int] = set()
        """Those that lead to other hosts, as long as nothing was reported of them."""

    def open(self, decode_epoch: int, address: str, answer: Answer) -> None:
        """A link to an address; `answer` gets None when it stands, or why it does not.

        Not if it is closed first. One that there is already stays.
        """
        if decode_epoch in self._links:
            answer(None)
            return
        if decode_epoch in self._making:
            self._making[decode_epoch] = self._making[decode_epoch][0], answer
            return
        if is_off_host(address):
            # A socket may move to another thread, if no two use it at a time.
            future = self._calls.submit(partial(self._contact, address))
        else:
            future = Future[Link]()
            try:
                future.set_result(dealer(self._identity, address))
            except ProtocolError as error:
                future.set_exception(error)
        self._making[decode_epoch] = future, answer
        if is_off_host(address):
            self._watched.add(decode_epoch)
        if future.done():
            self.collect()
        else:
            future.add_done_callback(lambda _: self._wake())

    def collect(self) -> None:
        """Take the links that stand, or do not, by now."""
        for decode_epoch, (future, answer) in list(self._making.items()):
            if not future.done():
                continue
            del self._making[decode_epoch]
            failure = None
            try:
                self._links[decode_epoch] = future.result()
            except ProtocolError as error:
                self._watched.discard(decode_epoch)
                failure = str(error)
            answer(failure)

    def close(self, decode_epoch: int) -> None:
        """The worker is gone, and its link with it, now or when it stands."""
        self._watched.discard(decode_epoch)
        link = self._links.pop(decode_epoch, None)
        if link is not None:
            link.close()
        making = self._making.pop(decode_epoch, None)
        if making is not None:
            making[0].add_done_callback(_close_unused)

    def post(self, message: RankToDecode) -> None:
        """Send one message to the worker that it names, unless that is gone."""
        link = self._links.get(message.peer_epoch)
        if link is not None:  # else nobody waits for this
            post(link, message)

    def all(self) -> list[Link]:
        """The links that stand."""
        return list(self._links.values())

    def broken(self, unreachable: Callable[[int], str | None]) -> list[tuple[int, str]]:
        """Workers of other hosts that cannot be spoken to, or that `unreachable` says so of.

        Each is named once: what breaks between two hosts is not mended.
        """
        found: list[tuple[int, str]] = []
        for decode_epoch in sorted(self._watched & self._links.keys()):
            lost = is_lost(self._links[decode_epoch])
            failure = "the link to it is lost" if lost else unreachable(decode_epoch)
            if failure is not None:
                self._watched.discard(decode_epoch)
                found.append((decode_epoch, failure))
        return found

    def _contact(self, address: str) -> Link:
        return dealer(self._identity, address, self._keys, contact_seconds=CONTACT_SECONDS)


def _close_unused(ended: Future[Link]) -> None:
    if ended.exception() is None:
        ended.result().close()
