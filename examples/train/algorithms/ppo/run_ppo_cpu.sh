#!/usr/bin/env bash
# PPO with a critic on two CPU cores, three steps: run_ppo_cpu.sh [--smoke] [key=value ...]
#
# No KL loss: two models train as it is, and a third, the reference, would take as long as a step.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" ppo ppo \
  trainer.max_training_steps=3 \
  trainer.algorithm.use_kl_loss=false \
  "$@"
