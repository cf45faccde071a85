"""The tables of an index."""

from __future__ import annotations

from typing import Final

SCHEMA_VERSION: Final = 3

SCHEMA: Final = """
CREATE TABLE waiting (
    key TEXT NOT NULL, id TEXT NOT NULL, version TEXT NOT NULL, target TEXT NOT NULL, routing_key TEXT NOT NULL,
    nominal INTEGER NOT NULL, due INTEGER NOT NULL, recurrence TEXT, is_paused INTEGER NOT NULL, resumed_at INTEGER,
    properties BLOB NOT NULL, body BLOB NOT NULL
);
CREATE INDEX waiting_by_key ON waiting (key, target, due);
CREATE INDEX waiting_by_due ON waiting (due, target) WHERE NOT is_paused;
CREATE INDEX recurring ON waiting (key) WHERE recurrence IS NOT NULL;
CREATE INDEX paused ON waiting (key, target, due) WHERE is_paused;
CREATE TABLE under_way (
    occurrence TEXT NOT NULL, key TEXT NOT NULL, id TEXT NOT NULL, target TEXT NOT NULL, routing_key TEXT NOT NULL,
    nominal INTEGER NOT NULL, due INTEGER NOT NULL, is_recurring INTEGER NOT NULL, is_run_now INTEGER NOT NULL,
    properties BLOB NOT NULL, body BLOB NOT NULL
);
CREATE INDEX under_way_by_occurrence ON under_way (occurrence);
CREATE INDEX under_way_by_key ON under_way (key);
CREATE TABLE finished (key TEXT PRIMARY KEY, version TEXT NOT NULL, tick INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (session TEXT PRIMARY KEY, tick INTEGER NOT NULL, entry TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE answers (request TEXT PRIMARY KEY, tick INTEGER NOT NULL, entry TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE position (
    record INTEGER, count INTEGER, tick INTEGER, carried INTEGER, checksum INTEGER,
    size INTEGER, carried_size INTEGER, snapshot INTEGER
);
INSERT INTO position VALUES (-1, 0, 0, 0, 0, 0, 0, NULL);
"""
