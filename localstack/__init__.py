"""Real object-store servers on this machine, for tests and for trying things out."""
