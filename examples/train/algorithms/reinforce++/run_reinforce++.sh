#!/usr/bin/env bash
# REINFORCE++ on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/reinforce++/run_reinforce++.sh [key=value ...]
export RUN_NAME=gsm8k_reinforce++_1.5B
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  +recipe=reinforce_pp \
  "$@"
