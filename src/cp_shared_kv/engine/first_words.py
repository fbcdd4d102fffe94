"""What processes say before the supervisor has said that they are there. No I/O."""

from __future__ import annotations

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import Checked, Paired, Registered
from cp_shared_kv.errors import ProtocolError

FirstWord = Registered | Paired | Checked
MOST_LIVES = 256
MOST_WORDS = 256
"""Of one life. A group says that it is there, and each decode worker that it can send to."""


class FirstWords:
    """Keeps them until the supervisor's word comes, which may be later; of the lives that wait for
    it, the last `MOST_LIVES`. Anybody can name himself a life, and nobody has to announce him."""

    def __init__(self) -> None:
        self._words: dict[Life, list[FirstWord]] = {}

    def keep(self, sender: Life, word: FirstWord) -> None:
        """ProtocolError for more words than a process has to say."""
        words = self._words.setdefault(sender, [])
        if len(words) == MOST_WORDS:
            raise ProtocolError("too many words of a process nobody announced", value=str(sender))
        words.append(word)
        if len(self._words) > MOST_LIVES:
            del self._words[next(iter(self._words))]

    def take(self, sender: Life) -> list[FirstWord]:
        """What a life that is announced now has said so far."""
        return self._words.pop(sender, [])
