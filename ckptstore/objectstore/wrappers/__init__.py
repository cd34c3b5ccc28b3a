"""Stores around stores: one idea a file."""
