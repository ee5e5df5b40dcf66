#!/usr/bin/env bash
# REINFORCE++ on two CPU cores, four steps: run_reinforce++_cpu.sh [--smoke] [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_cpu.sh" reinforce++ reinforce_pp "$@"
