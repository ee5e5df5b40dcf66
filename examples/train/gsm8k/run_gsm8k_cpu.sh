#!/usr/bin/env bash
# The same environment on two CPU cores: SmolLM2-135M and small word problems that the dataset script makes.
#
#   bash examples/train/gsm8k/run_gsm8k_cpu.sh [--smoke] [key=value ...]
#
# --smoke takes two small steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/train/on_cpu.sh

: "${DATA_DIR:=$HOME/data/gsm8k_cpu}"

prepare examples/train/gsm8k/gsm8k_dataset.py --made_here
train skyrl.train.entrypoints.main_base quickstart \
  trainer.max_prompt_length=128 \
  trainer.run_name=gsm8k_cpu \
  environment.env_class=gsm8k \
  "$@"
