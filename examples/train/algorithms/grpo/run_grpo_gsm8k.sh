#!/usr/bin/env bash
# GRPO on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/grpo/run_grpo_gsm8k.sh [key=value ...]
export RUN_NAME=gsm8k_grpo_1.5B
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" "$@"
