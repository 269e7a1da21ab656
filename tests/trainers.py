"""The Trainer that most tests train with."""

from typing import Any

import lightning as L


def quiet_trainer(**options: Any) -> L.Trainer:
    """A Trainer without progress bar, logger, checkpoints and summary, unless asked for."""
    defaults: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
    return L.Trainer(**({} if options.get("barebones") else defaults) | options)
