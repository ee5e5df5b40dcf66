#!/usr/bin/env bash
# An advantage estimator of your own on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/custom_advantage_estimator/run_custom_adv_est.sh [key=value ...]
export RUN_NAME=gsm8k_custom_adv_est_1.5B
export ENTRYPOINT=examples.train.algorithms.custom_advantage_estimator.main_custom_adv_est
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.advantage_estimator=simple_baseline \
  trainer.algorithm.use_kl_loss=false \
  "$@"
