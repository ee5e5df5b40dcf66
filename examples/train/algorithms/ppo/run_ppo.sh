#!/usr/bin/env bash
# PPO with a critic on GSM8K, one node with 4 GPUs; model, data and sizes as in ../../gsm8k/run_gsm8k.sh.
#
#   bash examples/train/algorithms/ppo/run_ppo.sh [key=value ...]
export RUN_NAME=gsm8k_ppo_1.5B
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  +recipe=ppo \
  trainer.placement.critic_num_gpus_per_node="${NUM_GPUS:-4}" \
  "$@"
