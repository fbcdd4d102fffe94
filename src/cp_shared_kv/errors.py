"""One exception tree. A message says what is wrong, the value, what is allowed, what to change."""

from __future__ import annotations


class CpkvError(Exception):
    """Base of everything this package raises on purpose.

    `what` names the problem; `value` is what was found; `allowed` what would be accepted;
    `change` what the reader can do about it. The parts make one readable line.
    """

    def __init__(
        self,
        what: str,
        *,
        value: object = None,
        allowed: str | None = None,
        change: str | None = None,
    ) -> None:
        self.what, self.value, self.allowed, self.change = what, value, allowed, change
        parts = [what if value is None else f"{what}: {value}"]
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        if change is not None:
            parts.append(f"to change it: {change}")
        super().__init__("; ".join(parts))


class ConfigError(CpkvError, ValueError):
    """Settings that are wrong, or that do not go together. Raised before any process starts."""


class LayoutError(CpkvError, ValueError):
    """A page, loc or position outside what the layout covers."""


class CapacityError(CpkvError):
    """More pages or bytes were asked for than exist."""


class RequestTooLongError(CapacityError):
    """A prompt that can never fit; `limit` is the most that could, `limit_name` what sets it."""

    def __init__(self, what: str, *, limit: int, limit_name: str, value: int) -> None:
        self.limit, self.limit_name = limit, limit_name
        super().__init__(
            what,
            value=value,
            allowed=f"at most {limit} tokens ({limit_name})",
            change="shorten the prompt or lower max_tokens",
        )


class InvariantError(CpkvError, AssertionError):
    """The books do not balance: a bug of ours, never of the caller's input."""


class CheckpointError(CpkvError, ValueError):
    """A model directory that is missing, truncated or of another shape than its config says."""


class TraceError(CpkvError, ValueError):
    """A request trace that cannot be read; the message names the file and the line."""


class ProtocolError(CpkvError, ValueError):
    """A message that is malformed, too large, or not allowed in the present state."""


class HandshakeError(ProtocolError):
    """Two ends that cannot work together; names the field, both values and which side to change."""


class StartupError(CpkvError):
    """A process of the cluster that could not start."""


class StartStoppedError(StartupError):
    """A start that was ended on request."""


class TransferError(CpkvError):
    """A KV write that did not complete.

    `kind` is a short machine-readable reason, `peer` the session written to, and `quiescent`
    says whether no byte of this write can still land.
    """

    def __init__(self, what: str, *, kind: str, peer: str, quiescent: bool, value: object = None):
        self.kind, self.peer, self.quiescent = kind, peer, quiescent
        super().__init__(what, value=value)
