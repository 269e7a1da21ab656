"""`lightning-megatrain export`: a checkpoint of :class:`CausalLM` as a folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse
import inspect
import os
import pickle
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers import GenerationConfig

from lightning_megatrain.datamodules.tokenizers import load_tokenizer
from lightning_megatrain.language_model import CausalLM

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(
    checkpoint: str | Path, output: str | Path, tokenizer: str | None = None, dtype: str = "float32", weights_only: bool = True
) -> Path:
    """Write config, weights (safetensors) and tokenizer of a checkpoint. Adapters of LoRA are merged into the weights.

    The checkpoint is memory-mapped: in FP32 nothing but merged weights is copied. The folder appears whole or not at all. It holds the
    language model: what a subclass of :class:`CausalLM` has besides is left out, with a warning.

    Args:
        checkpoint: A `.ckpt` file written while a :class:`CausalLM` trained.
        output: The folder to make; it may exist if it is empty.
        tokenizer: A hub id, a local folder or `"bytes"`. None: the one that the checkpoint's datamodule names.
        dtype: Of the weights written, `"float32"` or `"bfloat16"`.
        weights_only: Whether to refuse a file that holds objects other than tensors and plain values, a callback's for example. To read
            them may run code that the file brings: False is for files that you trust.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        FileExistsError: `output` exists and is not an empty folder.
        ValueError: The file is no checkpoint of a :class:`CausalLM`, or names no tokenizer.
        pickle.UnpicklingError: It holds other objects.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if checkpoint.is_dir():
        raise ValueError(
            f"{checkpoint} is a folder, as FSDP and DeepSpeed write it in shards: make one file of it first, with `python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {checkpoint}` or Lightning's convert_zero_checkpoint_to_fp32_state_dict."
        )
    if not checkpoint.is_file():
        raise FileNotFoundError(f"There is no checkpoint {checkpoint}.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists and is not an empty folder: choose another `--output`.")
    if dtype not in _DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}: it must be one of {', '.join(_DTYPES)}.")
    content = _load(checkpoint, weights_only)
    hyperparameters, state = content.get("hyper_parameters") or {}, content.get("state_dict")
    if not isinstance(state, dict) or not hyperparameters.get("model"):
        raise ValueError(f"{checkpoint} is no checkpoint of a CausalLM: it has no weights, or no hyperparameter `model`.")
    tokenizer = tokenizer or (content.get("datamodule_hyper_parameters") or {}).get("tokenizer")
    if tokenizer is None:
        raise ValueError(f"{checkpoint} does not name a tokenizer: give one with `--tokenizer`.")
    try:
        model = _rebuild(hyperparameters, state).to(_DTYPES[dtype])
    except RuntimeError as error:  # torch's list of weights that are missing, too many, or of another shape
        raise ValueError(f"The weights of {checkpoint} are not those of its hyperparameter `model`: {error}") from error

    output.parent.mkdir(parents=True, exist_ok=True)
    building = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(building)
        load_tokenizer(tokenizer).save_pretrained(building)
        building.replace(output)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return output


def _load(checkpoint: Path, weights_only: bool) -> dict[str, Any]:
    try:
        content = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=weights_only)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        others: list[str] = []
        with suppress(Exception):  # whatever a damaged file leads it to
            others = get_unsafe_globals_in_checkpoint(checkpoint)
        if weights_only and others:
            raise pickle.UnpicklingError(
                f"{checkpoint} holds more than tensors and plain values: {', '.join(others)}. If you trust the file, which may bring code "
                "of its own, read it with `--weights_only false`."
            ) from error
        raise ValueError(f"{checkpoint} cannot be read as a checkpoint: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{checkpoint} is no checkpoint: it holds a {type(content).__name__}.")
    return content


def _rebuild(hyperparameters: dict[str, Any], state: dict[str, torch.Tensor]) -> Any:
    """The Hugging Face model, its weights those of the checkpoint, no others ever allocated."""
    known = inspect.signature(CausalLM).parameters
    module = CausalLM(**{name: value for name, value in hyperparameters.items() if name in known})
    with torch.device("meta"):
        module.model = module.build(pretrained=False)
    if left_out := [name for name in state if not name.startswith("model.")]:
        rank_zero_warn(f"The folder holds the language model; the checkpoint's other weights are left out: {', '.join(left_out)}.")
    module.model.load_state_dict({name.removeprefix("model."): w for name, w in state.items() if name.startswith("model.")}, assign=True)
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
    parser.add_argument(
        "--weights_only", default="true", choices=["true", "false"], help="false: read a file that you trust whatever it holds"
    )
    given = parser.parse_args(arguments)
    try:
        print(f"Wrote {export(given.ckpt, given.output, given.tokenizer, given.dtype, given.weights_only == 'true')}")
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
