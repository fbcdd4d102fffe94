"""What the supervisor of a run and its satellites, on other hosts, say to each other.

ProcessUp and ProcessDown travel both ways besides: a satellite's of its decode workers, the
supervisor's of the server and the prefill groups. A satellite has one connection, which is
its session: what was agreed on it ends with it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.messages import LifeName
from cp_shared_kv.engine.run_spec import PageLayout
from cp_shared_kv.transfer.messages import Fingerprint, Reason

MAX_GUESTS = 64
"""Most decode workers of other hosts, at a time."""
INT64_MAX = (1 << 63) - 1

HostAddress = Annotated[str, Meta(pattern=r"\A[0-9]{1,3}(\.[0-9]{1,3}){3}\Z")]
_Setting = (
    Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
    | Annotated[str, Meta(max_length=4096)]
    | bool
    | None
)
Settings = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=100)], _Setting], Meta(max_length=200)
]
"""A config as `EngineConfig.as_plain` gives it; whoever takes it has its rules checked."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


# Satellite -> supervisor -----------------------------------------------------------------------


class Join(_Message, frozen=True, kw_only=True, tag="join"):
    """A satellite's first word: its release, its address, and the decode workers it would run."""

    release: Annotated[str, Meta(min_length=1, max_length=100)]
    host: HostAddress
    workers: Annotated[int, Meta(ge=1, le=MAX_GUESTS)]


class Leave(_Message, frozen=True, kw_only=True, tag="leave"):
    """A satellite's last word: its workers are reaped, or never began."""

    reason: Reason


# Supervisor -> satellite -----------------------------------------------------------------------


class Terms(_Message, frozen=True, kw_only=True, tag="terms"):
    """What a satellite needs to start its workers as this run's: everything but the weights, and no
    secret. `lives` are the first ones of its workers; later ones count on from there."""

    config: Settings
    limits: EngineLimits
    page_layout: PageLayout
    model_fingerprint: Fingerprint
    lives: Annotated[tuple[LifeName, ...], Meta(min_length=1, max_length=MAX_GUESTS)]


class Condemned(_Message, frozen=True, kw_only=True, tag="condemned"):
    """A worker of yours cannot be reached from here as it should: replace this life of it."""

    life: LifeName
    reason: Reason


class Dismissed(_Message, frozen=True, kw_only=True, tag="dismissed"):
    """Your session is over: your workers count as gone. You may join again."""

    reason: Reason


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """You cannot join, now or later."""

    reason: Reason


class RunOver(_Message, frozen=True, kw_only=True, tag="run_over"):
    """The run has ended, and nothing is left to do."""

    reason: Reason


# Both ways -------------------------------------------------------------------------------------


class StillHere(_Message, frozen=True, kw_only=True, tag="still_here"):
    """Said every second."""
