# Sourced by the CPU variants of the recipes, from the repository root: the model, the data, and one call that trains.

source scripts/environment

: "${MODEL_DIR:=$HOME/.cache/skyrl/SmolLM2-135M-Instruct}"

# What --smoke stands for: it shows that everything runs, not that anything is learned.
smoke=(trainer.max_training_steps=2 trainer.train_batch_size=4 trainer.policy_mini_batch_size=4
  trainer.micro_train_batch_size_per_gpu=16 generator.n_samples_per_prompt=4 trainer.ckpt_interval=2 trainer.eval_batch_size=8)

# prepare SCRIPT [arguments]: unpack the model once, and let the script write its data to DATA_DIR.
prepare() {
  in_environment python examples/train/quickstart/prepare_model.py --output_dir "$MODEL_DIR"
  in_environment python "$1" --output_dir "$DATA_DIR" "${@:2}"
}

# train MODULE PRESETS [--smoke] [key=value ...]: run an entry point on them; what stands later wins.
train() {
  local module="$1" presets="$2" argument overrides=()
  for argument in "${@:3}"; do
    if [[ "$argument" == --smoke ]]; then overrides+=("${smoke[@]}"); else overrides+=("$argument"); fi
  done
  SKYRL_LAUNCH_TIME="$(date +%s.%N)"
  export SKYRL_LAUNCH_TIME
  in_environment python -m "$module" \
    +recipe="$presets" \
    trainer.policy.model.path="$MODEL_DIR" \
    data.train_data="['$DATA_DIR/train.parquet']" \
    data.val_data="['$DATA_DIR/validation.parquet']" \
    "${overrides[@]}"
}
