#!/usr/bin/env bash
# SAPO on two CPU cores, four steps: run_sapo_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" sapo sapo "$@"
