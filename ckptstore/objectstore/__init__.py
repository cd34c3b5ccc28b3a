"""Bytes in places: the port, the engines behind it, and `open_store`. See README.md in this folder."""
