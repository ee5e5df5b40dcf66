#!/usr/bin/env bash
# The same environment on two CPU cores: SmolLM2-135M and small word problems that the dataset script makes.
#
#   bash examples/train/gsm8k/run_gsm8k_cpu.sh [--smoke] [key=value ...]
#
# --smoke takes two small steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/environment

: "${DATA_DIR:=$HOME/data/gsm8k_cpu}"
: "${MODEL_DIR:=$HOME/.cache/skyrl/SmolLM2-135M-Instruct}"
smoke=()
if [[ "${1:-}" == --smoke ]]; then
  shift
  smoke=(trainer.max_training_steps=2 trainer.train_batch_size=4 trainer.policy_mini_batch_size=4
    trainer.micro_train_batch_size_per_gpu=16 generator.n_samples_per_prompt=4 trainer.ckpt_interval=2 trainer.eval_batch_size=8)
fi

in_environment python examples/train/quickstart/prepare_model.py --output_dir "$MODEL_DIR"
in_environment python examples/train/gsm8k/gsm8k_dataset.py --made_here --output_dir "$DATA_DIR"

in_environment python -m skyrl.train.entrypoints.main_base \
  +recipe=quickstart \
  trainer.policy.model.path="$MODEL_DIR" \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.max_prompt_length=128 \
  trainer.run_name=gsm8k_cpu \
  environment.env_class=gsm8k \
  "${smoke[@]}" "$@"
