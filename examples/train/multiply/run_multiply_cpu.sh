#!/usr/bin/env bash
# The same on two CPU cores: SmolLM2-135M, one-digit numbers, up to two turns, one solved example in the prompt.
#
#   bash examples/train/multiply/run_multiply_cpu.sh [--smoke] [key=value ...]
#
# --smoke takes two small steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/environment

: "${DATA_DIR:=$HOME/data/multiply_cpu}"
: "${MODEL_DIR:=$HOME/.cache/skyrl/SmolLM2-135M-Instruct}"
smoke=()
if [[ "${1:-}" == --smoke ]]; then
  shift
  smoke=(trainer.max_training_steps=2 trainer.train_batch_size=4 trainer.policy_mini_batch_size=4
    trainer.micro_train_batch_size_per_gpu=16 generator.n_samples_per_prompt=4 trainer.ckpt_interval=2 trainer.eval_batch_size=8)
fi

in_environment python examples/train/quickstart/prepare_model.py --output_dir "$MODEL_DIR"
in_environment python examples/train/multiply/multiply_dataset.py --output_dir "$DATA_DIR" \
  --num_digits 1 --num_shots 1 --max_turns 2 --train_size 512 --validation_size 64

in_environment python -m examples.train.multiply.main_multiply \
  +recipe=quickstart \
  trainer.policy.model.path="$MODEL_DIR" \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.max_prompt_length=96 \
  trainer.run_name=multiply_cpu \
  generator.max_turns=2 \
  generator.max_input_length=192 \
  environment.env_class=multiply \
  "${smoke[@]}" "$@"
