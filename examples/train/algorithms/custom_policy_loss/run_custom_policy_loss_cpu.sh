#!/usr/bin/env bash
# A policy loss of your own on two CPU cores, four steps: run_custom_policy_loss_cpu.sh [--smoke] [key=value ...]
export ENTRYPOINT=examples.train.algorithms.custom_policy_loss.main_custom_policy_loss
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" custom_policy_loss "" \
  trainer.algorithm.policy_loss_type=reinforce \
  "$@"
