"""What an operator asks of a store and a run, without training: whether they are fit, and what was left behind."""
