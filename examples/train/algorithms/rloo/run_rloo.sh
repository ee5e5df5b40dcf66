#!/usr/bin/env bash
# RLOO on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/rloo/run_rloo.sh [key=value ...]
export RUN_NAME=gsm8k_rloo_1.5B
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  +recipe=rloo \
  "$@"
