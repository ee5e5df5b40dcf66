#!/usr/bin/env bash
# Multiplication with Qwen2.5-1.5B-Instruct, several turns, on one node with 4 GPUs.
#
#   SKYRL_EXTRAS="fsdp dev" scripts/setup
#   uv run --no-sync python examples/train/multiply/multiply_dataset.py --output_dir ~/data/multiply
#   bash examples/train/multiply/run_multiply.sh [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/environment

: "${DATA_DIR:=$HOME/data/multiply}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}"

in_environment python -m examples.train.multiply.main_multiply \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=true \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.policy.optimizer_config.lr=1.0e-6 \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.epochs=20 \
  trainer.train_batch_size=1024 \
  trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=64 \
  trainer.micro_train_batch_size_per_gpu=64 \
  trainer.max_prompt_length=512 \
  trainer.eval_batch_size=1024 \
  trainer.eval_interval=5 \
  trainer.ckpt_path="$HOME/ckpts/multiply_1.5B" \
  trainer.logger="$LOGGER" \
  trainer.project_name=multiply \
  trainer.run_name=multiply_1.5B \
  generator.max_turns=5 \
  generator.max_input_length=4096 \
  generator.n_samples_per_prompt=5 \
  generator.sampling_params.max_generate_length=1024 \
  generator.inference_engine.num_engines="$NUM_GPUS" \
  generator.inference_engine.gpu_memory_utilization=0.8 \
  environment.env_class=multiply \
  "$@"
