"""A training run, saved whole and resumed on any world size: what to save, when, and the proof that it went on."""
