#!/usr/bin/env bash
# RLOO on two CPU cores, four steps: run_rloo_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" rloo rloo "$@"
