#!/usr/bin/env bash
# KL-Cov on two CPU cores, four steps: run_kl_cov_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" kl_cov kl_cov "$@"
