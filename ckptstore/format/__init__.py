"""Bytes with meaning: keys, records, shards, parts and values. Pure: no store, no clock, no thread."""
