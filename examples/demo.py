"""Two minutes of everything: data, training, validation per domain, resume, export, and a text by the trained model.

The two domains are in every Python installation: the standard library's source, and the reference prose of `help("topics")`. No
network and no GPU is needed. All output goes to demo_run/ in the current folder.
"""

from __future__ import annotations

import argparse
import csv
import json
import pydoc_data.topics
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from lightning_megatrain.cli import main as lightning_megatrain

RUN = Path("demo_run")
CONFIG = Path(__file__).with_name("demo.yaml")
CODE_CHARACTERS = 1_500_000


def write_data(folder: Path) -> None:
    """Write each domain as JSON lines, one document a line."""
    folder.mkdir(parents=True)
    write_jsonl(folder / "prose.jsonl", pydoc_data.topics.topics.values())
    write_jsonl(folder / "code.jsonl", standard_library(CODE_CHARACTERS))


def standard_library(characters: int) -> Iterable[str]:
    """The source files of the standard library's top level, up to a number of characters."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        if characters < 0:
            return
        characters -= len(source)
        yield source


def write_jsonl(path: Path, documents: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document}) + "\n" for document in documents)


def run(*arguments: str | Path) -> None:
    """Run `lightning-megatrain` in this process, which saves the imports."""
    print("\n$ lightning-megatrain", *arguments, flush=True)
    lightning_megatrain([str(argument) for argument in arguments])


def print_perplexities() -> None:
    """Print what both runs logged at each validation."""
    print("\nValidation perplexity per byte\n  step   code  prose")
    for path in sorted((RUN / "lightning_logs").glob("version_*/metrics.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                if row.get("val_perplexity/code"):
                    code, prose = float(row["val_perplexity/code"]), float(row["val_perplexity/prose"])
                    print(f"{int(row['step']) + 1:6}{code:7.2f}{prose:7.2f}")


def sample(folder: Path, prompt: str) -> str:
    """A text by the exported model, loaded with nothing but transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    set_seed(1)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=160, do_sample=True, temperature=0.7, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps in all, half of them after a resume (default: %(default)s)")
    steps = parser.parse_args().steps

    if RUN.exists():
        shutil.rmtree(RUN)
    write_data(RUN / "data")
    often = f"--trainer.val_check_interval={max(1, steps // 6)}"
    run("fit", "-c", CONFIG, often, f"--trainer.max_steps={steps // 2}")
    run("fit", "-c", CONFIG, often, f"--trainer.max_steps={steps}", f"--ckpt_path={RUN}/checkpoints/last.ckpt")
    run("export", "--ckpt", RUN / "checkpoints/last.ckpt", "--output", RUN / "model")
    print_perplexities()
    print("\nA text by the exported model:\n" + sample(RUN / "model", "The standard "))


if __name__ == "__main__":
    main()
