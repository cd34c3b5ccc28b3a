"""Distributed training checkpoints in object stores: whole or absent, fenced, verified."""

__version__ = "0.1.0"
