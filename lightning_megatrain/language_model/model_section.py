"""The model section of a run's config: what a command that changes it may build on."""

from __future__ import annotations

from typing import Any

from lightning_megatrain.language_model.causal_lm import CausalLM
from lightning_megatrain.language_model.hugging_face_models import as_mapping, import_class, load_config


def describe_model(section: Any) -> dict[str, Any] | None:
    """Return the mapping that describes the model of a `CausalLM`: its own, or that of the hub id or folder that it names.

    Args:
        section: `class_path` and `init_args`, as the command line has parsed them.

    Returns:
        What :func:`load_config` takes, with which the weights are random; None for any other module.

    Raises:
        ValueError: There is no config at that hub id or folder.
    """
    arguments = section.get("init_args") or {}
    described = arguments.get("model")
    if not isinstance(described, str | dict) or not issubclass(import_class(section.get("class_path") or "builtins.object"), CausalLM):
        return None
    return described if isinstance(described, dict) else as_mapping(load_config(described, arguments.get("revision")))
