#!/usr/bin/env bash
# PPO with a critic on two CPU cores, four steps: run_ppo_cpu.sh [--smoke] [key=value ...]
#
# Two models train, so half as many prompts; and no KL loss, which would take a third model.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" ppo ppo \
  trainer.train_batch_size=4 \
  trainer.policy_mini_batch_size=2 \
  trainer.critic_mini_batch_size=2 \
  trainer.micro_train_batch_size_per_gpu=16 \
  trainer.algorithm.use_kl_loss=false \
  "$@"
