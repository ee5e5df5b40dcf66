#!/usr/bin/env bash
# GRPO on two CPU cores, four steps: run_grpo_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" grpo "" "$@"
