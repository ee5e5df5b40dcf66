#!/usr/bin/env bash
# An advantage estimator of your own on two CPU cores, four steps: run_custom_adv_est_cpu.sh [--smoke] [key=value ...]
export ENTRYPOINT=examples.train.algorithms.custom_advantage_estimator.main_custom_adv_est
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" custom_adv_est "" \
  trainer.algorithm.advantage_estimator=simple_baseline \
  "$@"
