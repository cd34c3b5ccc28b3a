"""What a training tells an observer, beside what saving and loading tell."""

from ckptstore.events import KeepFailed, ProofEnded, Resumed, Stepped, Stopping, TraceFailed

__all__ = ["KeepFailed", "ProofEnded", "Resumed", "Stepped", "Stopping", "TraceFailed"]
