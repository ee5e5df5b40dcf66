#!/usr/bin/env bash
# Dr. GRPO on two CPU cores, four steps: run_drgrpo_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" drgrpo drgrpo "$@"
