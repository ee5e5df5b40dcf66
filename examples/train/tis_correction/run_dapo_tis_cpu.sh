#!/usr/bin/env bash
# DAPO with truncated importance sampling on two CPU cores, three steps: run_dapo_tis_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../algorithms/run_cpu.sh" dapo_tis dapo,tis \
  trainer.max_training_steps=3 \
  generator.sampling_params.max_generate_length=16 \
  trainer.algorithm.overlong_buffer_len=4 \
  "$@"
