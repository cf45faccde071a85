"""Retry policies: pure functions from a failure to a decision."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from bide.durations import LONGEST, DelayLike, format_delay, parse_delay
from bide.errors import InvalidInputError
from bide.recoverability.decision import Decision, Discard, Park, RetryLater, RetryNow
from bide.recoverability.exception_rules import ExceptionRules
from bide.recoverability.failure import Failure
from bide.recoverability.retry_delays import MAX_RETRIES, delays_of, linear
from bide.runtime.arguments import real_number, whole_number

RetryPolicy = Callable[[Failure], Decision]
"""A pure function from a failure to a decision; :class:`Retry` is one."""

_MIN_POISON_LIMIT: Final = 10
_CRASHES: Final = 5
"""How many process deaths a message may survive in addition to its immediate retries."""

_HASHES: Final = 1 << 64
"""Number of values of an 8-byte hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Retry immediately, then with delays, then park.

    The default is NServiceBus's: 5 immediate retries, then delayed ones after 10, 20 and 30 s.

    Immediate retries start again after each delayed one, so a message is tried ``(immediate + 1) * (len(delays) + 1)``
    times before it is parked.

    Classes of exceptions can have other rules; the rule of the most specific class applies.

    Args:
        immediate: number of immediate retries, 0 to 100.
        delays: the delays of the delayed retries; see also :func:`bide.linear` and :func:`bide.exponential`.
        jitter: changes each delay by up to this fraction, up or down, 0 to 1, so that messages that failed together
            are not retried together. It is computed from the message id, or else the time of the failure: the same
            failure always gets the same delay.
        give_up_after: park the message if its next attempt would come later than this after its first failure.
        never: exceptions that park the message without a retry.
        at_once: exceptions that get immediate retries only.
        later: exceptions that get delayed retries only.
        discard: exceptions that drop the message.

    Raises:
        InvalidInputError: an argument is invalid.
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
        # The private fields hold the parsed values of the public ones.
        object.__setattr__(self, "_delays", delays_of(self.delays))
        object.__setattr__(self, "delays", self._delays)
        give_up = None if self.give_up_after is None else parse_delay(self.give_up_after)
        object.__setattr__(self, "_give_up_after", give_up)
        real_number("jitter", self.jitter, 0, 1)
        rules = ExceptionRules.make(never=self.never, at_once=self.at_once, later=self.later, discard=self.discard)
        object.__setattr__(self, "_rules", rules)

    @property
    def attempts(self) -> int:
        """How many times a message is tried at most."""
        return (self.immediate + 1) * (len(self._delays) + 1)

    @property
    def longest_delay(self) -> timedelta:
        """The longest delay of a retry, jitter included; zero without delayed retries."""
        return _scaled(max(self._delays, default=timedelta(0)), 1 + self.jitter)

    def __call__(self, failure: Failure) -> Decision:
        """Decide what happens to the message."""
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
        # Compared as two differences, because the sum of a time and a delay could overflow.
        return limit is None or delay - limit <= failure.first_failed_at - failure.failed_at

    def _jittered(self, delay: timedelta, failure: Failure) -> timedelta:
        if not self.jitter:
            return delay
        message = failure.message_id or failure.failed_at.isoformat()
        seed = f"{message}/{failure.queue}/{failure.delayed_retries}".encode(errors="surrogatepass")
        fraction = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest()) / _HASHES
        return _scaled(delay, 1 + self.jitter * (2 * fraction - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRetry:
    """Use the delayed retry of quorum queues (RabbitMQ 4.3 or newer): linear delays with a maximum, without jitter.

    The message stays in its queue, so bide publishes nothing for a retry. In exchange there are no exponential
    delays, no ``give_up_after``, and ``never`` and ``discard`` are the only rules for exceptions. Retry number n waits
    ``first * n``, at most ``longest`` (the rule of RabbitMQ's ``x-delayed-retry-*`` arguments).

    Args:
        first: delay of the first retry, at least 1 ms.
        longest: upper bound of all delays.
        times: number of retries before the message is parked, 1 to 1,000.
        never: exceptions that park the message without a retry.
        discard: exceptions that drop the message.

    Raises:
        InvalidInputError: an argument is invalid.
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
                "and not longer than the longest"
            )
        object.__setattr__(self, "_rules", ExceptionRules.make(never=self.never, discard=self.discard))

    @property
    def attempts(self) -> int:
        """How many times a message is tried at most."""
        return self.times + 1

    @property
    def queue_arguments(self) -> Mapping[str, Any]:
        """The arguments that the endpoint's queue needs."""
        return {
            # "failed" delays messages after a rejection or a lost consumer, not those that a stopping process requeues.
            "x-delayed-retry-type": "failed",
            "x-delayed-retry-min": _milliseconds(self.first),
            "x-delayed-retry-max": _milliseconds(self.longest),
        }

    def __call__(self, failure: Failure) -> Decision:
        """Decide what happens to the message."""
        rule = self._rules.of(failure.error)
        if rule == "discard":
            return _discarded(failure)
        return RetryNow() if rule is None and failure.attempt <= self.times else Park()


def check_policy(policy: object) -> None:
    """Check that a value can be used as a retry policy.

    Raises:
        InvalidInputError: it is not a function, or it is async.
    """
    if not callable(policy) or isinstance(policy, type):
        raise InvalidInputError(f"retry={policy!r}: give a bide.Retry(), or a function from a failure to a decision")
    if inspect.iscoroutinefunction(policy):
        raise InvalidInputError(f"retry={policy!r} is async: give a plain function, which decides without waiting")


def retries_at_once(policy: RetryPolicy) -> int:
    """How often a policy may requeue a message between delayed retries; 0 for a function, which does not say."""
    for name in ("immediate", "times"):
        value = getattr(policy, name, None)
        if isinstance(value, int):
            return value
    return 0


def poison_limit(policy: RetryPolicy) -> int:
    """The default number of deliveries since the last delayed retry after which a message is parked as poison."""
    return max(retries_at_once(policy) + _CRASHES, _MIN_POISON_LIMIT)


def _discarded(failure: Failure) -> Discard:
    return Discard(f"{type(failure.error).__qualname__} is discarded by the retry policy")


def _scaled(delay: timedelta, factor: float) -> timedelta:
    """Multiply a delay, limited to the longest delay that bide supports."""
    try:
        return min(delay * factor, LONGEST)
    except OverflowError:
        return LONGEST


def _milliseconds(delay: DelayLike) -> int:
    return -(-parse_delay(delay) // timedelta(milliseconds=1))
