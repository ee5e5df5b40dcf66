#!/usr/bin/env bash
# The same on two CPU cores: SmolLM2-135M, one-digit numbers, up to two turns, one solved example in the prompt.
#
#   bash examples/train/multiply/run_multiply_cpu.sh [--smoke] [key=value ...]
#
# --smoke takes two small steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/train/on_cpu.sh

: "${DATA_DIR:=$HOME/data/multiply_cpu}"

prepare examples/train/multiply/multiply_dataset.py \
  --num_digits 1 --num_shots 1 --max_turns 2 --train_size 512 --validation_size 64
train examples.train.multiply.main_multiply quickstart \
  trainer.max_prompt_length=96 \
  trainer.run_name=multiply_cpu \
  generator.max_turns=2 \
  generator.max_input_length=192 \
  environment.env_class=multiply \
  "$@"
