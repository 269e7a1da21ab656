"""What a policy raises."""

from __future__ import annotations


class PolicyError(RuntimeError):
    """A policy failed; the message names it and the step, ``__cause__`` is what happened."""
