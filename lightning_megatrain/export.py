"""`lightning-megatrain export`: a checkpoint of :class:`CausalLM` as a folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from lightning_megatrain.datamodules.tokenizers import load_tokenizer
from lightning_megatrain.language_model import CausalLM

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(checkpoint: str | Path, output: str | Path, tokenizer: str | None = None, dtype: str = "float32") -> Path:
    """Write config, weights (safetensors) and tokenizer of a checkpoint. Adapters of LoRA are merged into the weights.

    The checkpoint is memory-mapped: in FP32 nothing but merged weights is copied. The folder appears whole or not at all.

    Args:
        checkpoint: A `.ckpt` file written while a :class:`CausalLM` trained.
        output: The folder to make; it may exist if it is empty.
        tokenizer: A hub id, a local folder or `"bytes"`. None: the one that the checkpoint's datamodule names.
        dtype: Of the weights written, `"float32"` or `"bfloat16"`.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        FileExistsError: `output` exists and is not an empty folder.
        ValueError: The file is no checkpoint of a :class:`CausalLM`, or names no tokenizer.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if not checkpoint.is_file():
        raise FileNotFoundError(f"There is no checkpoint {checkpoint}.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists and is not an empty folder: choose another `--output`.")
    if dtype not in _DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}: it must be one of {', '.join(_DTYPES)}.")
    content = _load(checkpoint)
    hyperparameters = {key: value for key, value in content.get("hyper_parameters", {}).items() if not key.startswith("_")}
    if "state_dict" not in content or "model" not in hyperparameters:
        raise ValueError(f"{checkpoint} is no checkpoint of a CausalLM: it has no hyperparameter `model`.")
    tokenizer = tokenizer or content.get("datamodule_hyper_parameters", {}).get("tokenizer")
    if tokenizer is None:
        raise ValueError(f"{checkpoint} does not name a tokenizer: give one with `--tokenizer`.")
    model = _rebuild(hyperparameters, content["state_dict"]).to(_DTYPES[dtype])

    output.parent.mkdir(parents=True, exist_ok=True)
    building = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(building)
        load_tokenizer(tokenizer).save_pretrained(building)
        building.replace(output)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return output


def _load(checkpoint: Path) -> dict[str, Any]:
    try:
        content = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{checkpoint} cannot be read as a checkpoint: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{checkpoint} is no checkpoint: it holds a {type(content).__name__}.")
    return content


def _rebuild(hyperparameters: dict[str, Any], state: dict[str, torch.Tensor]) -> Any:
    """The Hugging Face model, its weights those of the checkpoint, no others ever allocated."""
    module = CausalLM(**hyperparameters)
    with torch.device("meta"):
        module.model = module.build(pretrained=False)
    module.load_state_dict(state, assign=True)
    model = module.model.merge_and_unload() if hyperparameters.get("lora") is not None else module.model
    model.tie_weights()
    source = hyperparameters["model"]
    if isinstance(source, str):
        try:
            model.generation_config = GenerationConfig.from_pretrained(source, revision=hyperparameters.get("revision"))
        except OSError:  # most models have none
            model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `lightning-megatrain export`."""
    parser = argparse.ArgumentParser("lightning-megatrain export", description="Write a checkpoint as a folder that transformers loads.")
    parser.add_argument("--ckpt", required=True, help="checkpoint of a CausalLM")
    parser.add_argument("--output", required=True, help="folder to make")
    parser.add_argument("--tokenizer", help="hub id, folder or 'bytes'; default: the one of the checkpoint's datamodule")
    parser.add_argument("--dtype", default="float32", choices=list(_DTYPES), help="of the weights written (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        print(f"Wrote {export(given.ckpt, given.output, given.tokenizer, given.dtype)}")
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
