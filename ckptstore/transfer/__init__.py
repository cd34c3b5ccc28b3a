"""Shards on their way to a store and back: streamed out and hashed, read in ranges and verified."""
