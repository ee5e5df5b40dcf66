#!/usr/bin/env bash
# GSM8K with Qwen2.5-1.5B-Instruct, colocated, on one node with 4 GPUs: GRPO with a KL loss, which are the defaults of
# trainer.algorithm.
#
#   SKYRL_EXTRAS="fsdp dev" scripts/setup
#   uv run --no-sync python examples/train/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   bash examples/train/gsm8k/run_gsm8k.sh [key=value ...]
#
# The scripts of other recipes call this one: ENTRYPOINT and RUN_NAME are theirs to set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/environment

: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=vllm}"
: "${ENTRYPOINT:=skyrl.train.entrypoints.main_base}"
: "${RUN_NAME:=gsm8k_1.5B}"

in_environment python -m "$ENTRYPOINT" \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.policy.optimizer_config.lr=1.0e-6 \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp \
  trainer.epochs=20 \
  trainer.update_epochs_per_batch=1 \
  trainer.train_batch_size=1024 \
  trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=64 \
  trainer.micro_train_batch_size_per_gpu=64 \
  trainer.max_prompt_length=512 \
  trainer.eval_batch_size=1024 \
  trainer.eval_before_train=true \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  trainer.ckpt_path="$HOME/ckpts/$RUN_NAME" \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=gsm8k \
  trainer.run_name="$RUN_NAME" \
  generator.batched=true \
  generator.n_samples_per_prompt=5 \
  generator.sampling_params.max_generate_length=1024 \
  generator.inference_engine.backend="$INFERENCE_BACKEND" \
  generator.inference_engine.num_engines="$NUM_GPUS" \
  generator.inference_engine.tensor_parallel_size=1 \
  generator.inference_engine.gpu_memory_utilization=0.8 \
  generator.inference_engine.run_engines_locally=true \
  generator.inference_engine.weight_sync_backend=nccl \
  environment.env_class=gsm8k \
  "$@"
