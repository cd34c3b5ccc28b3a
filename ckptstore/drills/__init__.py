"""Drills: what must hold when something breaks, tried with real processes in the user's own bucket."""
