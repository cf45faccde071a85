'use strict';
// Delays and schedules of bide: what to publish and what to declare. docs/wire-contract.md has the rules.

const LEVELS = [
  ['e', 8_640_000_000, 31],
  ['d', 86_400_000, 99],
  ['h', 3_600_000, 23],
  ['m', 60_000, 59],
  ['s', 1_000, 59],
  ['c', 10, 99],
];
const RESOLUTION = 10;
const LONGEST = LEVELS.reduce((sum, [, unit, highest]) => sum + unit * highest, 0);
const BASE = 'bide.v1';
const WORDS_AT_APPLY = 4; // 'bide delay apply' binds the digits for routing keys of up to four words
const MAX_NAME = 255;
const PARTITIONS = 8;
const TRANSPORT_KEY = /^(?:~\.)*~(?:[edhmsc][0-9]{1,2}(?:\/[0-9]+)?|[qrxk][:#].*)$/s;
const DEATHS = /^(?:x-death|x-(?:first|last)-death-(?:exchange|queue|reason)|x-delivery-count|x-acquired-count)$/;

// -- delayed messages

// What to publish and to declare for a message to {queue, isolated} or {exchange, routing_key} after a delay in
// milliseconds. `release` is the broker's, `properties` are those of the message. Only headers, priority and
// expiration change.
function delayed({ target, delay, now, release, properties = {} }) {
  if (!Number.isInteger(delay) || delay < 0) throw new RangeError(`the delay ${delay} is not a whole number from 0 on`);
  const wait = Math.ceil(delay / RESOLUTION) * RESOLUTION;
  if (wait > LONGEST) throw new RangeError(`the delay ${delay} is longer than ${LONGEST} ms`);
  checkTarget(target);
  const toQueue = target.queue !== undefined;
  const routingKey = toQueue ? target.queue : target.routing_key;
  const headers = { ...properties.headers, 'bide-sent': now, 'bide-due': now + delay };
  if (!wait) {
    const publish = { exchange: toQueue ? '' : target.exchange, routing_key: routingKey, properties: { ...properties, headers } };
    return { publish, waits_in: [], declare: { queues: [], bindings: [] } };
  }
  const padding = toQueue ? '' : '~.'.repeat(words(routingKey) - 1);
  const digits = digitsOf(wait);
  const targetKey = padding + keyOf(target);
  if (Buffer.byteLength(targetKey) > MAX_NAME) throw new RangeError(`the key ${targetKey} is longer than ${MAX_NAME} bytes`);
  const keys = digits.map(([letter, digit]) => `${padding}~${letter}${digit}`);
  headers[carrier(release)] = [...keys, targetKey];
  headers['bide-to'] = toQueue ? `q:${target.queue}` : `x:${target.exchange}`;
  // In a delay queue these two would act on the wait.
  const { priority, expiration, ...others } = properties;
  if (priority !== undefined) headers['bide-priority'] = priority;
  if (expiration !== undefined) headers['bide-expiration'] = expiration;
  const declare = targetDeclarations(target, targetKey);
  if (!toQueue && words(routingKey) > WORDS_AT_APPLY) declare.bindings.push(...digitBindings(digits, keys));
  return {
    publish: { exchange: `${BASE}.in.${digits[0][0]}`, routing_key: routingKey, properties: { ...others, headers } },
    waits_in: digits.filter(([, digit]) => digit).map(([letter, digit]) => `${BASE}.${letter}${digit}`),
    declare,
  };
}

// From 4.0 on the broker keeps BCC keys, and receivers do not see them.
function carrier(release) {
  return Number.parseInt(release, 10) >= 4 ? 'BCC' : 'CC';
}

function checkTarget({ queue, exchange, routing_key: routingKey }) {
  for (const name of queue !== undefined ? [queue] : [exchange, routingKey]) {
    if (Buffer.byteLength(name) > MAX_NAME) throw new RangeError(`${name} is longer than ${MAX_NAME} bytes`);
    if (TRANSPORT_KEY.test(name) && name !== exchange) throw new RangeError(`${name} has the form of a transport key`);
  }
  if ((queue ?? exchange) === '') throw new RangeError('the target has no name');
}

function words(routingKey) {
  return routingKey.split('.').length;
}

// The levels from the highest with a digit down to the lowest, each with its digit.
function digitsOf(wait) {
  const digits = [];
  for (const [letter, unit] of LEVELS) {
    const digit = Math.floor(wait / unit);
    wait -= digit * unit;
    if (digit || digits.length) digits.push([letter, digit]);
  }
  return digits;
}

function keyOf({ queue, isolated, exchange }) {
  if (queue !== undefined) return `${isolated ? '~r' : '~q'}:${queue}`;
  return `~x:${exchange.replaceAll('%', '%25').replaceAll('.', '%2E')}`;
}

// The binding of the target, and the release queue of exchanges and isolated queues.
function targetDeclarations({ queue, isolated, exchange }, targetKey) {
  const bind = (destination) => ({
    queues: [],
    bindings: [{ source: `${BASE}.delivery`, destination, destination_type: 'queue', routing_key: targetKey }],
  });
  if (queue !== undefined && !isolated) return bind(queue);
  const name = `${BASE}.release.${queue !== undefined ? `q:${queue}` : `x:${exchange}`}`;
  if (Buffer.byteLength(name) > MAX_NAME) throw new RangeError(`the name ${name} is longer than ${MAX_NAME} bytes`);
  const args = {
    'x-queue-type': 'quorum',
    'x-message-ttl': 0,
    'x-dead-letter-exchange': queue !== undefined ? '' : exchange,
    'x-dead-letter-strategy': 'at-least-once',
    'x-overflow': 'reject-publish',
    'x-queue-leader-locator': 'balanced',
  };
  if (queue !== undefined) args['x-dead-letter-routing-key'] = queue;
  return { ...bind(name), queues: [{ name, arguments: args }] };
}

function digitBindings(digits, keys) {
  return digits.map(([letter, digit], place) => ({
    source: `${BASE}.${letter}`,
    destination: digit ? `${BASE}.${letter}${digit}` : `${BASE}.${digits[place + 1]?.[0] ?? 'released'}`,
    destination_type: digit ? 'queue' : 'exchange',
    routing_key: keys[place],
  }));
}

// -- received messages

// What a received message says about its wait: due time in milliseconds, and the key of its schedule.
function received(headers) {
  return { due: headers['bide-due'] ?? null, key: headers['bide-key'] ?? null };
}

// The headers, priority and expiration for a copy of a received message.
function copyOf(headers) {
  const copy = { headers: {} };
  for (const [name, value] of Object.entries(headers)) {
    if (!name.startsWith('bide-') && !['CC', 'BCC'].includes(name) && !DEATHS.test(name)) copy.headers[name] = value;
  }
  if ('bide-priority' in headers) copy.priority = headers['bide-priority'];
  if ('bide-expiration' in headers) copy.expiration = headers['bide-expiration'];
  return copy;
}

// -- schedules

const CRC_TABLE = Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0xedb88320 : byte >>> 1;
  return byte >>> 0;
});

function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 0xff];
  return (crc ^ 0xffffffff) >>> 0;
}

function partitionOf(key) {
  return crc32(Buffer.from(key)) % PARTITIONS;
}

const LARGE = 64_000;
const SPACES = 4_096;

// The record of an operation: {exchange, routing_keys, body}. A message has properties, and a body of bytes.
function recordOf(operation, now) {
  const { kind, request, key, target, filter, due, at, if_absent, if_version, interval, message } = operation;
  const record = { v: 1, kind, request, key };
  let tail = Buffer.alloc(0);
  if (kind === 'schedule') {
    const properties = propertyBytes(message.properties);
    Object.assign(record, { ...addressOf(target), nominal: due, due });
    if (interval !== undefined) record.every = { interval, anchor: now, catch_up: 'last' };
    Object.assign(record, { if_absent, if_version, message: [properties.length, message.body.length] });
    tail = Buffer.concat([properties, message.body]);
  } else {
    const { target: wanted, ...conditions } = filter ?? {};
    if (filter) record.filter = { ...conditions, ...(wanted && { to: addressOf(wanted).to }) };
    Object.assign(record, { due, at, if_version });
  }
  let head = JSON.stringify(record); // leaves absent fields out
  // Gates add fields of their own to large messages, and the broker must accept the result as well.
  if (Buffer.byteLength(head) + 1 + tail.length >= LARGE) head = head.slice(0, 5) + ' '.repeat(SPACES) + head.slice(5);
  const partitions = key === undefined ? Array.from({ length: PARTITIONS }, (_, one) => one) : [partitionOf(key)];
  return {
    exchange: `${BASE}.schedule`,
    routing_keys: partitions.map(String),
    body: Buffer.concat([Buffer.from(`${head}\n`), tail]),
  };
}

function addressOf({ queue, exchange, routing_key: routingKey }) {
  return queue !== undefined ? { to: `q:${queue}` } : { to: `x:${exchange}`, routing_key: routingKey || undefined };
}

// The properties in the order of an AMQP 0-9-1 content header. Their flags begin with the highest bit.
const PROPERTIES = [
  ['content_type', shortString],
  ['content_encoding', shortString],
  ['headers', (table) => longString(Buffer.concat(Object.entries(table).flatMap(([name, value]) => [shortString(name), field(value)])))],
  ['delivery_mode', (value) => Buffer.from([value])],
  ['priority', (value) => Buffer.from([value])],
  ['correlation_id', shortString],
  ['reply_to', shortString],
  ['expiration', shortString],
  ['message_id', shortString],
  ['timestamp', int64],
  ['type', shortString],
  ['user_id', shortString],
  ['app_id', shortString],
];

function propertyBytes(properties) {
  const unknown = Object.keys(properties).find((name) => !PROPERTIES.some(([known]) => known === name));
  if (unknown) throw new RangeError(`${unknown} is not a property of a message`);
  let flags = 0;
  const parts = [];
  PROPERTIES.forEach(([name, encode], place) => {
    if (properties[name] === undefined) return;
    flags |= 0x8000 >> place;
    parts.push(encode(properties[name]));
  });
  return Buffer.concat([Buffer.from([flags >> 8, flags & 0xff]), ...parts]);
}

function shortString(text) {
  const bytes = Buffer.from(text);
  if (bytes.length > MAX_NAME) throw new RangeError(`${text} is longer than ${MAX_NAME} bytes`);
  return Buffer.concat([Buffer.from([bytes.length]), bytes]);
}

function longString(bytes) {
  const length = Buffer.alloc(4);
  length.writeUInt32BE(bytes.length);
  return Buffer.concat([length, bytes]);
}

function int64(value) {
  const bytes = Buffer.alloc(8);
  bytes.writeBigInt64BE(BigInt(value));
  return bytes;
}

function field(value) {
  if (typeof value === 'string') return Buffer.concat([Buffer.from('S'), longString(Buffer.from(value))]);
  if (!Number.isSafeInteger(value)) throw new RangeError(`the header value ${value} is neither text nor a whole number`);
  if (value !== (value | 0)) return Buffer.concat([Buffer.from('l'), int64(value)]);
  const bytes = Buffer.from('I\0\0\0\0');
  bytes.writeInt32BE(value, 1);
  return bytes;
}

// The answer of a gate: {outcome, version, ...}.
function answerOf(body) {
  const { v, ...answer } = JSON.parse(body.toString());
  if (v !== 1) throw new RangeError(`the version ${v} of an answer is unknown`);
  return answer;
}

// The question for what waits under a key.
function questionOf(key) {
  const body = Buffer.from(`${JSON.stringify({ v: 1, ask: 'key', key })}\n`);
  return { exchange: `${BASE}.schedule`, routing_key: `queries.${partitionOf(key)}`, body };
}

// What the answer to a question says. The messages behind its first line are left out.
function stateOf(body) {
  const { entries } = answerOf(body.subarray(0, body.indexOf('\n')));
  const waiting = entries.find((one) => one.is === 'waiting');
  if (waiting) return { state: waiting.is_paused ? 'paused' : 'waiting', due: waiting.due, version: waiting.version };
  return entries.length ? { state: 'under-way', due: entries[0].due } : { state: 'none' };
}

module.exports = { BASE, answerOf, copyOf, delayed, partitionOf, questionOf, received, recordOf, stateOf };
