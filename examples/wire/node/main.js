'use strict';
// Delays, receives, schedules and cancels messages on the RabbitMQ of BIDE_URL. `node main.js` lists the commands.

const amqp = require('amqplib');
const { randomBytes, randomUUID } = require('node:crypto');
const { setTimeout: sleep } = require('node:timers/promises');
const { check } = require('./vectors.js');
const wire = require('./wire.js');

const REPLY_TO = 'amq.rabbitmq.reply-to';
const REPEAT_AFTER = 2_000;
const TIMEOUT = 300_000;
const RESERVATION_BYTES = 64_000;
const RECORD_OVERHEAD = 250;

const COMMANDS = {
  vectors: ['FILE', async (file) => console.log(`${check(file)} vectors are right`)],
  delay: ['TARGET MILLISECONDS BODY', connected(delay)],
  receive: ['QUEUE COUNT', connected(receive)],
  retry: ['QUEUE MILLISECONDS', connected(retry)],
  schedule: ['KEY TARGET MILLISECONDS BODY', connected(schedule)],
  scheduled: ['KEY', connected(scheduled)],
  cancel: ['KEY', connected(cancel)],
};

function connected(run) {
  return async (...args) => {
    const connection = await amqp.connect(process.env.BIDE_URL ?? 'amqp://localhost');
    try {
      await run(connection, ...args);
    } finally {
      await connection.close();
    }
  };
}

// A channel whose errors are those of the calls that they interrupt.
async function opened(opening) {
  const channel = await opening;
  channel.on('error', () => {});
  return channel;
}

// -- delayed messages

// TARGET is JSON: {"queue": "orders"} or {"exchange": "shop", "routing_key": "order.created"}.
async function delay(connection, target, milliseconds, body) {
  const channel = await opened(connection.createConfirmChannel());
  const due = await publishDelayed(connection, channel, JSON.parse(target), Number(milliseconds), {}, Buffer.from(body));
  console.log(`due ${due}`);
}

async function publishDelayed(connection, channel, target, milliseconds, properties, body) {
  // This exchange exists if 'bide delay apply' was run: without it, digit queues may be missing.
  await channel.checkExchange(`${wire.BASE}.complete`);
  const release = connection.connection.serverProperties.version;
  const delayed = () => wire.delayed({ target, delay: milliseconds, now: Date.now(), release, properties });
  const { declare } = delayed();
  for (const one of declare.queues) await channel.assertQueue(one.name, { durable: true, arguments: one.arguments });
  for (const { source, destination, destination_type: type, routing_key: key } of declare.bindings) {
    await (type === 'queue' ? channel.bindQueue(destination, source, key) : channel.bindExchange(destination, source, key));
  }
  const { publish } = delayed(); // the delay begins now
  await confirmed(channel, publish.exchange, publish.routing_key, body, publish.properties);
  return publish.properties.headers['bide-due'];
}

// Publish a persistent message, and wait until the broker has it. A message without a queue is an error.
async function confirmed(channel, exchange, routingKey, body, options) {
  const messageId = options.messageId ?? randomUUID();
  await new Promise((resolve, reject) => {
    const onReturn = ({ properties }) => {
      if (properties.messageId === messageId) reject(new Error(`no queue takes messages for ${exchange} ${routingKey}`));
    };
    channel.on('return', onReturn);
    channel.publish(exchange, routingKey, body, { ...options, messageId, persistent: true, mandatory: true }, (error) => {
      channel.off('return', onReturn);
      error ? reject(error) : resolve();
    });
  });
}

// -- received messages

async function receive(connection, queue, count) {
  const channel = await opened(connection.createChannel());
  await channel.prefetch(Number(count));
  let left = Number(count);
  await consuming(channel, queue, async (message) => {
    const { properties, content } = message;
    const { due, key } = wire.received(properties.headers ?? {});
    const { headers } = wire.copyOf(properties.headers ?? {});
    console.log(JSON.stringify({ body: content.toString(), due, key, received: Date.now(), headers }));
    channel.ack(message);
    return --left > 0;
  });
  await channel.close(); // the acknowledgements are sent before
}

// Delay a copy of a message, and acknowledge the message when the broker has the copy.
async function retry(connection, queue, milliseconds) {
  const channel = await opened(connection.createConfirmChannel());
  await channel.prefetch(1);
  await consuming(channel, queue, async (message) => {
    const { userId, ...properties } = message.properties; // the broker refuses the name of another user
    const copy = { ...properties, ...wire.copyOf(properties.headers ?? {}) };
    await publishDelayed(connection, channel, { queue }, Number(milliseconds), copy, message.content);
    channel.ack(message);
    return false;
  });
  await channel.close();
}

// Handle messages one after the other while `handle` returns true.
async function consuming(channel, queue, handle) {
  await new Promise((resolve, reject) => {
    let before = Promise.resolve(true);
    const take = (message) => {
      if (message === null) return reject(new Error(`the queue ${queue} was deleted`));
      before = before.then((goesOn) => goesOn && handle(message));
      before.then((goesOn) => goesOn || resolve(), reject);
    };
    channel.on('close', () => reject(new Error('the broker closed the channel')));
    channel.consume(queue, take).catch(reject);
  });
}

// -- schedules

async function schedule(connection, key, target, milliseconds, body) {
  const properties = { delivery_mode: 2, message_id: randomUUID(), headers: { 'bide-sent': Date.now() } };
  const message = { properties, body: Buffer.from(body) };
  const operation = { kind: 'schedule', key, target: JSON.parse(target), due: Date.now() + Number(milliseconds), message };
  const log = new ScheduleLog(connection);
  console.log(`scheduled, version ${await log.append(operation, { needsAnswer: false })}`);
}

async function cancel(connection, key) {
  const log = new ScheduleLog(connection);
  const answer = await log.append({ kind: 'cancel', key }, { needsAnswer: true });
  console.log(answer.outcome);
}

async function scheduled(connection, key) {
  const log = new ScheduleLog(connection);
  console.log(JSON.stringify(await log.ask(key)));
}

class ScheduleLog {
  #connection;
  #others; // the channel for reservations and questions
  #partitions = new Map();
  #answers = new Map();

  constructor(connection) {
    this.#connection = connection;
  }

  // Append an operation on a key, and repeat it until it is confirmed, or answered if it needs an answer. Gates apply
  // a repeated request once. Returns the version of an unconditional schedule, or the answer.
  async append(operation, { needsAnswer }) {
    const partition = await this.#partition(wire.partitionOf(operation.key));
    const request = `${partition.session}-${++partition.number}`;
    const { exchange, routing_keys: [routingKey], body } = wire.recordOf({ ...operation, request }, Date.now());
    const answered = new Promise((resolve) => this.#answers.set(request, resolve));
    const until = Date.now() + TIMEOUT;
    let isConfirmed = false;
    while (Date.now() < until) {
      await this.#takeRoom(partition, routingKey, body.length);
      const options = { messageId: request, correlationId: request, replyTo: REPLY_TO };
      const confirm = confirmed(partition.channel, exchange, routingKey, body, options).then(() => {
        isConfirmed = true;
      });
      const late = sleep(REPEAT_AFTER, 'late', { ref: false });
      const outcome = await Promise.race([needsAnswer ? confirm.then(() => answered) : confirm, late]);
      if (outcome !== 'late') return needsAnswer ? wire.answerOf(outcome) : request;
    }
    throw new Error(isConfirmed ? 'the operation is recorded, and no gate answered' : 'the broker has not confirmed the operation');
  }

  // What waits under a key. The leading gate answers.
  async ask(key) {
    const { exchange, routing_key: routingKey, body } = wire.questionOf(key);
    const until = Date.now() + TIMEOUT;
    while (Date.now() < until) {
      const id = randomUUID();
      const answered = new Promise((resolve) => this.#answers.set(id, resolve));
      const options = { messageId: id, correlationId: id, replyTo: REPLY_TO, expiration: String(REPEAT_AFTER) };
      await confirmed(await this.#otherChannel(), exchange, routingKey, body, options);
      const answer = await Promise.race([answered, sleep(REPEAT_AFTER, undefined, { ref: false })]);
      if (answer !== undefined) return wire.stateOf(answer);
    }
    throw new Error('no gate answered');
  }

  // Each partition has a channel of its own, on which nothing else is published.
  async #partition(number) {
    if (!this.#partitions.has(number)) {
      const channel = await this.#answeredChannel();
      this.#partitions.set(number, { channel, session: randomBytes(10).toString('hex'), number: 0, room: 0 });
    }
    return this.#partitions.get(number);
  }

  async #otherChannel() {
    this.#others ??= await this.#answeredChannel();
    return this.#others;
  }

  // Answers come on the channel of their requests.
  async #answeredChannel() {
    const channel = await opened(this.#connection.createConfirmChannel());
    const onAnswer = ({ properties, content }) => this.#answers.get(properties.correlationId)?.(content);
    await channel.consume(REPLY_TO, onAnswer, { noAck: true });
    return channel;
  }

  // A reservation stands for 64 KB of records. The broker refuses it when no gate has carried the log forward for long.
  async #takeRoom(partition, routingKey, bytes) {
    for (partition.room -= bytes + RECORD_OVERHEAD; partition.room < 0; partition.room += RESERVATION_BYTES) {
      await confirmed(await this.#otherChannel(), `${wire.BASE}.schedule`, `room.${routingKey}`, Buffer.alloc(0), {});
    }
  }
}

const [name, ...args] = process.argv.slice(2);
const [usage, run] = COMMANDS[name] ?? ['', undefined];
if (run === undefined || args.length !== usage.split(' ').length) {
  for (const [command, [parameters]] of Object.entries(COMMANDS)) console.error(`node main.js ${command} ${parameters}`);
  process.exitCode = 2;
} else {
  run(...args).catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
  });
}
