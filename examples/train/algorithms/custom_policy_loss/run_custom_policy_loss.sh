#!/usr/bin/env bash
# A policy loss of your own on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/custom_policy_loss/run_custom_policy_loss.sh [key=value ...]
export RUN_NAME=gsm8k_custom_policy_loss_1.5B
export ENTRYPOINT=examples.train.algorithms.custom_policy_loss.main_custom_policy_loss
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.policy_loss_type=reinforce \
  trainer.algorithm.use_kl_loss=false \
  "$@"
