#!/usr/bin/env bash
# SAPO on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/sapo/run_sapo_gsm8k.sh [key=value ...]
export RUN_NAME=gsm8k_sapo_1.5B
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  +recipe=sapo \
  "$@"
