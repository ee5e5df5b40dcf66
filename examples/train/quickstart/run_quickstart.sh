#!/usr/bin/env bash
# Set up, prepare model and data, and train SmolLM2-135M to add two numbers, on two CPU cores.
#
#   bash examples/train/quickstart/run_quickstart.sh [--smoke] [key=value ...]
#
# --smoke takes two small steps: it shows that everything runs, not that anything is learned.
# DATA_DIR and MODEL_DIR say where data and model are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/environment

: "${DATA_DIR:=$HOME/data/quickstart}"
: "${MODEL_DIR:=$HOME/.cache/skyrl/SmolLM2-135M-Instruct}"
smoke=()
if [[ "${1:-}" == --smoke ]]; then
  shift
  smoke=(trainer.max_training_steps=2 trainer.train_batch_size=4 trainer.policy_mini_batch_size=4
    trainer.micro_train_batch_size_per_gpu=16 generator.n_samples_per_prompt=4 trainer.ckpt_interval=2 trainer.eval_batch_size=8)
fi

in_environment python examples/train/quickstart/prepare_model.py --output_dir "$MODEL_DIR"
in_environment python examples/train/quickstart/quickstart_dataset.py --output_dir "$DATA_DIR"

SKYRL_LAUNCH_TIME="$(date +%s.%N)"
export SKYRL_LAUNCH_TIME
in_environment python -m examples.train.quickstart.main_quickstart \
  +recipe=quickstart \
  trainer.policy.model.path="$MODEL_DIR" \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  "${smoke[@]}" "$@"
