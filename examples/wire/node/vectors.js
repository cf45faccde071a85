'use strict';
// Compares wire.js with docs/wire-vectors.json.

const assert = require('node:assert/strict');
const { createHash } = require('node:crypto');
const { readFileSync } = require('node:fs');
const wire = require('./wire.js');

// Throws an AssertionError at the first difference, and returns the number of vectors.
function check(file) {
  const vectors = JSON.parse(readFileSync(file, 'utf8'));
  for (const { publish, waits_in, declare, ...given } of vectors.routes) {
    assert.deepEqual(wire.delayed(given), { publish, waits_in, declare });
  }
  for (const { target, delay } of [...vectors.refused, ...vectors.hashed]) {
    assert.throws(() => wire.delayed({ target, delay, now: 0, release: '3.10.8' }), RangeError);
  }
  for (const { headers, due, key, copy } of vectors.received) {
    assert.deepEqual(wire.received(headers), { due, key });
    assert.deepEqual(wire.copyOf(headers), copy);
  }
  for (const [key, partition] of Object.entries(vectors.partitions)) assert.equal(wire.partitionOf(key), partition);
  for (const { operation, now, append } of vectors.records) checkRecord(operation, now, append);
  for (const { key, publish, answer, found } of vectors.questions) {
    const question = wire.questionOf(key);
    assert.deepEqual({ ...question, body: JSON.parse(question.body) }, publish);
    assert.deepEqual(wire.stateOf(Buffer.from(answer)), found);
  }
  return Object.values(vectors).reduce((sum, group) => sum + (typeof group === 'object' ? Object.keys(group).length : 0), 0);
}

function checkRecord(operation, now, append) {
  const { message } = operation;
  if (message) {
    const { body } = message;
    const text = typeof body === 'string' ? body : body.repeat.repeat(body.times);
    operation = { ...operation, message: { ...message, body: Buffer.from(text) } };
  }
  const made = wire.recordOf(operation, now);
  assert.deepEqual([made.exchange, made.routing_keys], [append.exchange, append.routing_keys]);
  const end = made.body.indexOf('\n');
  const head = made.body.subarray(0, end).toString();
  assert.equal(head.slice(0, 5 + append.spaces), '{"v":' + ' '.repeat(append.spaces));
  assert.notEqual(head[5 + append.spaces], ' ');
  assert.deepEqual(JSON.parse(head), append.head);
  const tail = made.body.subarray(end + 1);
  if (typeof append.tail === 'string') assert.equal(tail.toString('hex'), append.tail);
  else assert.equal(createHash('sha256').update(tail).digest('hex'), append.tail.sha256);
}

module.exports = { check };
