#!/usr/bin/env bash
# What the CPU variants in the folders beside it share: SmolLM2-135M learns to add two numbers (the quickstart's task), in four
# steps of 64 rollouts. Two optimizer steps a batch, so that ratios leave 1 and clipping has something to clip; no evaluation and
# no checkpoint, which would take longer than the steps.
#
#   bash examples/train/algorithms/run_cpu.sh NAME PRESETS [--smoke] [key=value ...]
#
# PRESETS come on top of the quickstart's: a name of skyrl/config/recipe, several with commas, or none ("").
# ENTRYPOINT is the module to run, another than the quickstart's when it registers something of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/train/on_cpu.sh

: "${DATA_DIR:=$HOME/data/quickstart}"
: "${ENTRYPOINT:=examples.train.quickstart.main_quickstart}"
smoke+=(trainer.critic_mini_batch_size=4 trainer.ckpt_interval=-1)

prepare examples/train/quickstart/quickstart_dataset.py
train "$ENTRYPOINT" "[quickstart${2:+,$2}]" \
  trainer.run_name="$1" \
  trainer.max_training_steps=4 \
  trainer.policy_mini_batch_size=4 \
  trainer.critic_mini_batch_size=4 \
  trainer.micro_train_batch_size_per_gpu=32 \
  trainer.eval_before_train=false \
  trainer.eval_interval=-1 \
  trainer.ckpt_interval=-1 \
  "${@:3}"
