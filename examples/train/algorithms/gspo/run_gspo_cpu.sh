#!/usr/bin/env bash
# GSPO on two CPU cores, four steps: run_gspo_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" gspo gspo "$@"
