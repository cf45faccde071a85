"""Celery applications whose delayed tasks wait in RabbitMQ, in the queues of ``Clock``.

Change one line::

    from bide.integrations.celery import CeleryApp as Celery

``countdown``, ``eta`` and ``retry`` then publish through Celery's own connection into the delay infrastructure. Workers
get a task when it is due, from the default exchange or the exchange that it was sent to, with its own routing key. For
a worker, also one without this module, it looks like a task without a delay, and its retries go back to its queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import celery
from celery.app import amqp
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import abstract, entity

from bide.delay.protocol import HEADER_PRIORITY, ExchangeTarget, QueueTarget, Target
from bide.errors import InvalidDelayError, InvalidInputError
from bide.integrations.declarations import Declaration
from bide.integrations.delays import DelayedPublish, Delays

if TYPE_CHECKING:
    from bide.integrations.celery_keys import KeyedTasks

# Celery, and most of kombu, have no type annotations.
_Celery: Any = celery.Celery
_AMQP: Any = amqp.AMQP
_MaybeChannelBound: Any = abstract.MaybeChannelBound
_Queue: Any = entity.Queue

_WHEN: Final = "bide_when"
"""The option of a task that carries its due time, so that Celery's native delayed delivery does not apply."""

_KEYED: Final = "keyed"
"""The option of a task that can be cancelled while it waits."""

_ETA_POSITION: Final = 5
"""The place of ``eta`` in the arguments of ``as_task_v2``, after task id, name, args, kwargs and countdown."""

_INTERNAL_ERROR: Final = 541
"""The reply code of an internal error of the broker."""

_WITHOUT_NATIVE_DELAY: Final = "bide.integrations.celery_worker:ConsumerWithoutNativeDelay"


class _When(NamedTuple):
    """The due time of a task.

    Attributes:
        eta: the due time for the task's message, as the caller gave it or computed from the countdown.
        countdown: the countdown, if there is one.
    """

    eta: Any
    countdown: timedelta | None


class CeleryApp(_Celery):  # type: ignore[misc]  # its package has no types
    """A Celery application. Its delayed tasks wait in RabbitMQ; on other brokers it works as Celery does.

    The setting ``bide_infrastructure`` is the delay infrastructure, ``bide.Clock()`` by default.

    With the setting ``bide_keyed``, ``apply_async(countdown=60, keyed=True)`` delays a task in the schedule log, under
    its task id, and ``revoke`` cancels it there. A gate has to run.
    """

    amqp_cls = "bide.integrations.celery:DelayingAMQP"
    control_cls = "bide.integrations.celery_keys:CancellingControl"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_defaults({"worker_consumer": _WITHOUT_NATIVE_DELAY})

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: Any = None,
        eta: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """See :meth:`celery.Celery.send_task`.

        Raises:
            InvalidDelayError: the delay is longer than the infrastructure's longest delay.
            InvalidInputError: the task is keyed, and has no delay, or the application may not have keyed tasks.
        """
        if options.get(_KEYED) and countdown is None and eta is None:
            raise InvalidInputError(
                f"keyed=True for the task {name} without a delay, which cannot be cancelled: give countdown= or "
                "eta= too, or leave keyed out"
            )
        if countdown:
            # In UTC, because local times would be off by an hour if daylight saving time begins or ends meanwhile.
            try:
                eta = (datetime.now(UTC) + timedelta(seconds=countdown)).astimezone(self.timezone)
            except OverflowError as error:
                raise InvalidDelayError(f"the countdown {countdown!r} ends after the year 9999: shorten it") from error
        if eta:
            options[_WHEN] = _When(eta, timedelta(seconds=countdown) if countdown and countdown > 0 else None)
        return super().send_task(name, args, kwargs, None, None, *more, **options)


class DelayingAMQP(_AMQP):  # type: ignore[misc]  # its package has no types
    """Creates and publishes the tasks of a :class:`CeleryApp`."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self._delays: Delays | None = None
        self._keyed: KeyedTasks | None = None

    @property
    def keyed(self) -> KeyedTasks:
        """The keyed tasks of this application."""
        if self._keyed is None:
            # Imported here, because few applications have keyed tasks.
            from bide.integrations.celery_keys import KeyedTasks

            self._keyed = KeyedTasks(self.app)
        return self._keyed

    @property
    def delays(self) -> Delays:
        """The routes of this application's delayed tasks."""
        if self._delays is None:
            self._delays = Delays(self.app.conf.get("bide_infrastructure"))
        return self._delays

    def as_task_v1(self, *args: Any, **options: Any) -> Any:
        """See :meth:`celery.app.amqp.AMQP.as_task_v1`."""
        return super().as_task_v1(*_with_eta(args, options), **options)

    def as_task_v2(self, *args: Any, **options: Any) -> Any:
        """See :meth:`celery.app.amqp.AMQP.as_task_v2`."""
        return super().as_task_v2(*_with_eta(args, options), **options)

    def _create_task_sender(self) -> Callable[..., Any]:
        send = super()._create_task_sender()

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            when, keyed = options.pop(_WHEN, None), options.pop(_KEYED, False)
            self._clean(options)
            if when is not None and producer.connection.transport.driver_type == "amqp":
                tasks = self.keyed if keyed else None
                producer = _DelayingProducer(
                    producer, self.delays, tasks, message.headers, self._due(when.eta), when.countdown
                )
            return send(producer, name, message, **options)

        return send_task_message

    def _due(self, eta: Any) -> datetime:
        """The due time as the worker understands the header ``eta``."""
        due: datetime = maybe_make_aware(maybe_iso8601(eta), self.app.timezone)
        return due

    def _clean(self, options: dict[str, Any]) -> None:
        """Remove the traces of an earlier delay from a task that is sent again, as retries are."""
        headers = options.get("headers")
        if not headers:
            return
        exchange, routing_key = _name_of(options.get("exchange")), options.get("routing_key") or ""
        sent = self.delays.restore(exchange, routing_key, {"headers": headers})
        options["headers"] = sent.values["headers"]
        if HEADER_PRIORITY in headers and not options.get("priority"):
            options["priority"] = headers[HEADER_PRIORITY]
        if exchange and self.delays.owns(exchange):
            # A client of bide delayed it to a queue that is not isolated, so an exchange of bide delivered it.
            if sent.exchange:
                options.update(exchange=sent.exchange, routing_key=sent.routing_key)
            else:
                queue = _Queue(sent.routing_key, no_declare=True)
                options.update(exchange=None, routing_key=None, queue=queue, declare=[])


class _DelayingProducer:
    """A producer that delays one task. Events of that task go through the original producer.

    Args:
        keyed: stores the task in the schedule log, if it is a keyed one.
        headers: the headers object of the task, by which its message is recognized.
        countdown: the delay at the first publish, or None. A countdown of exactly 5 s waits in one queue. The time that
            is left until the due time is some milliseconds shorter, and would need more queues.
    """

    def __init__(
        self,
        producer: Any,
        delays: Delays,
        keyed: KeyedTasks | None,
        headers: Mapping[str, Any],
        due: datetime,
        countdown: timedelta | None,
    ) -> None:
        self._producer = producer
        self._delays = delays
        self._keyed = keyed
        self._headers = headers
        self._due = due
        self._countdown = countdown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """See :meth:`kombu.Producer.publish`."""
        if options.get("headers") is not self._headers:
            return self._producer.publish(body, **options)
        target = _target(options.pop("exchange"), options.pop("routing_key"))
        headers = options.pop("headers")
        if self._keyed is not None:
            for queue in options.get("declare") or ():
                self._producer.maybe_declare(queue)
            key = options["correlation_id"]
            self._keyed.add(body, key=key, due=self._due, target=target, headers=headers, options=options)
            return None
        connection = self._producer.channel.connection
        properties = {"headers": headers}
        if (priority := options.pop("priority", None)) is not None:
            properties["priority"] = priority
        if (expiration := options.pop("expiration", None)) is not None:
            properties["expiration"] = str(int(expiration * 1000))
        countdown, self._countdown = self._countdown, None
        publish = self._delays.route(
            target,
            delay=countdown,
            due=self._due if countdown is None else None,
            server_properties=connection.server_properties,
            properties=properties,
        )
        if not publish.hops and expiration is not None:
            options["expiration"] = expiration
        if "priority" in publish.properties:
            options["priority"] = priority
        options["declare"] = [*(options.get("declare") or ()), _Requirements(self._delays, publish)]
        try:
            return self._producer.publish(
                body,
                exchange=publish.exchange,
                routing_key=publish.routing_key,
                headers=dict(publish.properties["headers"]),
                **options,
            )
        except Exception:
            # The delay infrastructure may have been deleted.
            self._delays.forget(connection)
            raise


class _Requirements(_MaybeChannelBound):  # type: ignore[misc]  # its package has no types
    """The queues and bindings of a delayed task. kombu declares them before it publishes, also after a reconnect."""

    name = ""

    def __init__(self, delays: Delays, publish: DelayedPublish) -> None:
        super().__init__()
        self._delays = delays
        self._publish = publish

    def __copy__(self) -> _Requirements:
        return _Requirements(self._delays, self._publish)

    def declare(self, nowait: bool = False, channel: Any = None) -> None:
        """Declare what this connection has not declared yet."""
        channel = channel or self.channel
        declarations = list(self._delays.declarations(self._publish, connection=channel.connection))
        if not declarations:
            return
        connection = channel.connection
        try:
            for declaration in declarations[:-1]:
                _call(channel, declaration, nowait=True)
            # The broker answers in order, so this answer means that all of them succeeded.
            _call(channel, declarations[-1], nowait=False)
        except connection.connection_errors as error:
            if getattr(error, "reply_code", None) != _INTERNAL_ERROR:
                raise
            # A busy broker aborts declarations (bide.admin.declaring), and accepts them later. kombu repeats a publish
            # after a recoverable error, as the retry policy says.
            raise connection.recoverable_connection_errors[0](str(error)) from error
        self._delays.declared(self._publish, connection=connection)


def _call(channel: Any, declaration: Declaration, *, nowait: bool) -> None:
    """Make a call on a channel of py-amqp, whose names differ from pika's."""
    method, arguments = declaration
    if method == "exchange_declare":
        arguments = {name: value for name, value in arguments.items() if name not in ("exchange_type", "internal")}
        arguments["type"] = declaration.arguments["exchange_type"]
    getattr(channel, method)(nowait=nowait, **arguments)


def _with_eta(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The positional arguments of ``as_task_v1`` and ``as_task_v2``, with the due time as their ``eta``."""
    when = options.pop(_WHEN, None)
    if when is None:
        return args
    eta = when.eta
    if len(args) > _ETA_POSITION:
        return (*args[:_ETA_POSITION], eta, *args[_ETA_POSITION + 1 :])
    options["eta"] = eta
    return args


def _target(exchange: Any, routing_key: str) -> Target:
    name = _name_of(exchange)
    return ExchangeTarget(name, routing_key or "") if name else QueueTarget(routing_key, isolated=True)


def _name_of(exchange: Any) -> str:
    return cast("str", getattr(exchange, "name", exchange) or "")
