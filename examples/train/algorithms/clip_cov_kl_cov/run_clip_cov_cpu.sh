#!/usr/bin/env bash
# Clip-Cov on two CPU cores, four steps: run_clip_cov_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" clip_cov clip_cov "$@"
