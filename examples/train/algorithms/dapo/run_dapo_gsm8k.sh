#!/usr/bin/env bash
# DAPO on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/dapo/run_dapo_gsm8k.sh [key=value ...]
export RUN_NAME=gsm8k_dapo_1.5B
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  +recipe=dapo \
  trainer.algorithm.overlong_buffer_len=512 \
  "$@"
