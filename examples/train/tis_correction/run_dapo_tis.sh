#!/usr/bin/env bash
# DAPO with truncated importance sampling on GSM8K, one node with 4 GPUs; model, data and sizes as in ../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/tis_correction/run_dapo_tis.sh [key=value ...]
export RUN_NAME=gsm8k_dapo_tis_1.5B
exec bash "$(dirname "${BASH_SOURCE[0]}")/../gsm8k/run_gsm8k.sh" \
  "+recipe=[dapo,tis]" \
  trainer.algorithm.overlong_buffer_len=512 \
  "$@"
