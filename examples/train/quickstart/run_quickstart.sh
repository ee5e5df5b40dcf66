#!/usr/bin/env bash
# Set up, prepare model and data, and train SmolLM2-135M to add two numbers, on two CPU cores.
#
#   bash examples/train/quickstart/run_quickstart.sh [--smoke] [key=value ...]
#
# --smoke takes two small steps: it shows that everything runs, not that anything is learned.
# DATA_DIR and MODEL_DIR say where data and model are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/train/on_cpu.sh

: "${DATA_DIR:=$HOME/data/quickstart}"

prepare examples/train/quickstart/quickstart_dataset.py
train examples.train.quickstart.main_quickstart quickstart "$@"
