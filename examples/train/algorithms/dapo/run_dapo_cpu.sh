#!/usr/bin/env bash
# DAPO on two CPU cores, three steps: run_dapo_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" dapo dapo \
  trainer.max_training_steps=3 \
  generator.sampling_params.max_generate_length=16 \
  trainer.algorithm.overlong_buffer_len=4 \
  "$@"
