"""Retry policies: pure functions from a failure to a decision."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from bide.arguments import real_number, whole_number
from bide.durations import LONGEST, DelayLike, format_delay, parse_delay
from bide.errors import InvalidInputError
from bide.recoverability.decision import Decision, Discard, Park, RetryLater, RetryNow
from bide.recoverability.failure import Failure
from bide.recoverability.rules import ExceptionRules
from bide.recoverability.schedule import MAX_RETRIES, delays_of, linear

RetryPolicy = Callable[[Failure], Decision]
"""Any pure function of the failure; :class:`Retry` is one."""

_LEAST_POISON_LIMIT: Final = 10
_CRASHES: Final = 5
"""Process deaths that a message may survive in addition to all its immediate retries."""

_WHOLE: Final = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Retry at once, then later, then park. The default is NServiceBus's: 5 at once, 3 later at 10, 20 and 30 s.

    The immediate retries are granted again after every delayed one, so a message is tried
    ``(immediate + 1) * (len(delays) + 1)`` times before it is parked.

    Exceptions can have rules of their own; the most specific class wins.

    Args:
        immediate: retries at once, 0 to 100.
        delays: the delays of the retries after those; see also :func:`bide.linear` and :func:`bide.exponential`.
        jitter: each delay is changed by up to this part of it, up or down, so that messages that failed together are
            not retried together: 0 to 1. It is computed from the message id, or else the time of the failure, so that
            the same failure gives the same decision.
        give_up_after: park rather than retry when the next attempt would come later than this after the first failure.
        never: these exceptions park the message at once.
        at_once: these are retried at once only, and not later.
        later: these are retried later only, and not at once.
        discard: these drop the message.

    Raises:
        InvalidInputError: in one of its kinds.
    """

    immediate: int = 5
    delays: Iterable[DelayLike] = linear(timedelta(seconds=10), times=3)
    jitter: float = 0.0
    give_up_after: DelayLike | None = None
    never: tuple[type[BaseException], ...] = ()
    at_once: tuple[type[BaseException], ...] = ()
    later: tuple[type[BaseException], ...] = ()
    discard: tuple[type[BaseException], ...] = ()
    _delays: tuple[timedelta, ...] = field(init=False, repr=False)
    _give_up_after: timedelta | None = field(init=False, repr=False)
    _rules: ExceptionRules = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole_number("immediate", self.immediate, 0, 100)
        # The fields are the caller's words; these are what they mean.
        object.__setattr__(self, "_delays", delays_of(self.delays))
        object.__setattr__(self, "delays", self._delays)
        give_up = None if self.give_up_after is None else parse_delay(self.give_up_after)
        object.__setattr__(self, "_give_up_after", give_up)
        real_number("jitter", self.jitter, 0, 1)
        rules = ExceptionRules.make(never=self.never, at_once=self.at_once, later=self.later, discard=self.discard)
        object.__setattr__(self, "_rules", rules)

    @property
    def attempts(self) -> int:
        """How often a message is tried at most."""
        return (self.immediate + 1) * (len(self._delays) + 1)

    @property
    def longest_delay(self) -> timedelta:
        """No delayed retry is later than this, jitter included; zero where there is none."""
        return _scaled(max(self._delays, default=timedelta(0)), 1 + self.jitter)

    def __call__(self, failure: Failure) -> Decision:
        """The decision about this failure."""
        rule = self._rules.of(failure.error)
        if rule == "discard":
            return _discarded(failure)
        if rule == "never":
            return Park()
        if rule != "later" and failure.attempt <= self.immediate:
            return RetryNow() if self._in_time(failure, timedelta(0)) else Park()
        if rule == "at_once" or failure.delayed_retries >= len(self._delays):
            return Park()
        delay = self._jittered(self._delays[failure.delayed_retries], failure)
        return RetryLater(delay) if self._in_time(failure, delay) else Park()

    def _in_time(self, failure: Failure, delay: timedelta) -> bool:
        limit = self._give_up_after
        # In this order no sum overflows: either difference of two delays is one.
        return limit is None or delay - limit <= failure.first_failed_at - failure.failed_at

    def _jittered(self, delay: timedelta, failure: Failure) -> timedelta:
        if not self.jitter:
            return delay
        message = failure.message_id or failure.failed_at.isoformat()
        seed = f"{message}/{failure.queue}/{failure.delayed_retries}".encode(errors="surrogatepass")
        place = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest()) / _WHOLE
        return _scaled(delay, 1 + self.jitter * (2 * place - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRetry:
    """Let a quorum queue of RabbitMQ 4.3 or newer do the waiting itself: linear delays, capped, without jitter.

    The message stays in its queue, so nothing is published for a retry; in exchange there is no exponential
    schedule, no ``give_up_after`` and no other rule per exception than ``never`` and ``discard``. The n-th retry
    waits ``first * n``, at most ``longest`` (rule of RabbitMQ 4.3's ``x-delayed-retry-*`` arguments).

    Args:
        first: the first delay, at least 1 ms.
        longest: no delay is longer.
        times: retries before the message is parked, 1 to 1,000.
        never: these exceptions park the message at once.
        discard: these drop it.

    Raises:
        InvalidInputError: in one of its kinds.
    """

    first: DelayLike
    longest: DelayLike
    times: int
    never: tuple[type[BaseException], ...] = ()
    discard: tuple[type[BaseException], ...] = ()
    _rules: ExceptionRules = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole_number("times", self.times, 1, MAX_RETRIES)
        first, longest = parse_delay(self.first), parse_delay(self.longest)
        if not timedelta(milliseconds=1) <= first <= longest:
            raise InvalidInputError(
                f"first={format_delay(first)} and longest={format_delay(longest)}: give a first delay of at least 1 ms "
                "that is no longer than the longest"
            )
        object.__setattr__(self, "_rules", ExceptionRules.make(never=self.never, discard=self.discard))

    @property
    def attempts(self) -> int:
        """How often a message is tried at most."""
        return self.times + 1

    @property
    def queue_arguments(self) -> Mapping[str, Any]:
        """The arguments that the endpoint's queue needs."""
        return {
            # "failed": rejections and lost consumers wait. What is only given back, at a stop, does not.
            "x-delayed-retry-type": "failed",
            "x-delayed-retry-min": _milliseconds(self.first),
            "x-delayed-retry-max": _milliseconds(self.longest),
        }

    def __call__(self, failure: Failure) -> Decision:
        """The decision about this failure."""
        rule = self._rules.of(failure.error)
        if rule == "discard":
            return _discarded(failure)
        return RetryNow() if rule is None and failure.attempt <= self.times else Park()


def check_policy(policy: object) -> None:
    """See that this can be called with a failure and gives a decision.

    Raises:
        InvalidInputError: it cannot.
    """
    if not callable(policy) or isinstance(policy, type):
        raise InvalidInputError(f"retry={policy!r}: give a bide.Retry(), or a function from a failure to a decision")
    if inspect.iscoroutinefunction(policy):
        raise InvalidInputError(
            f"retry={policy!r} is async: a policy is a plain function, which does nothing but decide"
        )


def retries_at_once(policy: RetryPolicy) -> int:
    """How often a policy may send a message back to its queue; 0 for a function, which does not say."""
    for name in ("immediate", "times"):
        value = getattr(policy, name, None)
        if isinstance(value, int):
            return value
    return 0


def poison_limit(policy: RetryPolicy) -> int:
    """Deliveries of a message since its last delayed retry after which it is taken for poison, by default."""
    return max(retries_at_once(policy) + _CRASHES, _LEAST_POISON_LIMIT)


def _discarded(failure: Failure) -> Discard:
    return Discard(f"{type(failure.error).__qualname__} is discarded by the retry policy")


def _scaled(delay: timedelta, factor: float) -> timedelta:
    """The product, no longer than the longest delay."""
    try:
        return min(delay * factor, LONGEST)
    except OverflowError:
        return LONGEST


def _milliseconds(delay: DelayLike) -> int:
    return -(-parse_delay(delay) // timedelta(milliseconds=1))
