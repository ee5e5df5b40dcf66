#!/usr/bin/env bash
# MaxRL on two CPU cores, four steps: run_maxrl_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" maxrl maxrl "$@"
