#!/usr/bin/env bash
# Multiplication with Qwen2.5-1.5B-Instruct, several turns, on one node with 4 GPUs; the settings of gsm8k otherwise.
#
#   SKYRL_EXTRAS="fsdp dev" scripts/setup
#   uv run --no-sync python examples/train/multiply/multiply_dataset.py --output_dir ~/data/multiply
#   bash examples/train/multiply/run_multiply.sh [key=value ...]
set -euo pipefail
export ENTRYPOINT=examples.train.multiply.main_multiply RUN_NAME=multiply_1.5B DATA_DIR="${DATA_DIR:-$HOME/data/multiply}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../gsm8k/run_gsm8k.sh" \
  trainer.project_name=multiply \
  generator.batched=false \
  generator.max_turns=5 \
  generator.max_input_length=4096 \
  environment.env_class=multiply \
  "$@"
