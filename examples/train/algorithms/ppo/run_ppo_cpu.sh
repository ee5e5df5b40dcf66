#!/usr/bin/env bash
# PPO with a critic on two CPU cores, four steps: run_ppo_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" ppo ppo "$@"
