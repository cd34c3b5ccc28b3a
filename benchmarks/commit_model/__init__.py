"""A bounded model of the commit protocol, explored state by state. `python -m benchmarks model` runs it."""
