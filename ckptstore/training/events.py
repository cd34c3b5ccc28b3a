"""What a training tells an observer, beside what saving and loading tell."""

from ckptstore.events import ProofEnded, Resumed, Stepped, Stopping, TraceFailed

__all__ = ["ProofEnded", "Resumed", "Stepped", "Stopping", "TraceFailed"]
