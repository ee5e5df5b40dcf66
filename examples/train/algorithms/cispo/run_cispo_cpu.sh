#!/usr/bin/env bash
# CISPO on two CPU cores, four steps: run_cispo_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" cispo cispo "$@"
