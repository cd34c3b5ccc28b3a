"""One drill a file. Each returns what was seen, or raises `NotAsPromised`."""
