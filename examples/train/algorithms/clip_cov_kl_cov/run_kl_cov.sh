#!/usr/bin/env bash
# KL-Cov on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/clip_cov_kl_cov/run_kl_cov.sh [key=value ...]
export RUN_NAME=gsm8k_kl_cov_1.5B
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  +recipe=kl_cov \
  "$@"
