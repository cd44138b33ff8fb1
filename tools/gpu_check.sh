#!/usr/bin/env bash
# Runs tests/gpu and the benchmarks on a machine with a GPU, in under nine minutes and without a package registry, and
# leaves a report. Fails if any part failed, could not start or ran past its time.
#
#     tools/gpu_check.sh SITE_FOLDER [REPORT_FOLDER]
#
# SITE_FOLDER: unpacked packages that this Python lacks (Transformer Engine and what it needs; pytest); several folders
# are joined by colons, as in PYTHONPATH. REPORT_FOLDER: ./gpu-report; it must not exist yet. PYTHON names the
# interpreter (python3). With REHEARSAL=1 the benchmarks take sizes that a CPU computes, and all parts ten times as long
# (docs/gpu.md).

set -uo pipefail

# Limits; docs/lab-log.md has the counts of processes that they come from. 65 + 220 + 40 + 40 + 145 and five times 5 seconds
# to end what ran past its limit: 535, of nine minutes.
readonly PROBE_SECONDS=65
readonly TEST_SECONDS=220 # of each file in tests/gpu; with nine cores all of them run at once
readonly FAN_SECONDS=40
readonly HEAD_SECONDS=40
readonly TRAIN_SECONDS=145
readonly KILL_AFTER=5
# The benchmarks' sizes.
fan_size=(--presets fanformer-1b)
head_size=(--tokens 16384 --hidden-size 2048 --vocab-size 50304)
# Two models at once need some 62 GB; a third would not fit into 80.
train_size=(--preset fanformer-1b --models fanformer transformer --seq-length 2048 --micro-batch-size 4 --rounds 3)
patience=1
if [[ -n ${REHEARSAL:-} ]]; then
    fan_size=(--hidden-sizes 256 --tokens 256 --repeats 1)
    head_size=(--tokens 1024 --hidden-size 64 --vocab-size 8192 --repeats 1 --distributed-backend gloo)
    train_size=(--config examples/tiny-cpu.yaml --seq-length 64 --micro-batch-size 1 --rounds 1
        --set runtime.distributed_backend '"gloo"')
    patience=10
fi
# What the package, its tests on a GPU and the benchmarks import.
readonly MODULES="torch transformer_engine.pytorch megatron.core triton numpy yaml rich tensorboard psutil safetensors
    isal msgspec pydantic pytest pytest_timeout"

usage() {
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[[ $# -ge 1 && $# -le 2 ]] || usage
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
report=${2:-gpu-report}
python=${PYTHON:-python3}
[[ ! -e $report ]] || { echo "gpu_check: $report exists; name another report folder" >&2; exit 2; }
path=$root
IFS=: read -r -a folders <<<"$1"
for folder in "${folders[@]}"; do
    [[ -d $folder ]] || { echo "gpu_check: $folder is no folder; name unpacked packages" >&2; exit 2; }
    path=$path:$(cd "$folder" && pwd) || exit 1
done
mkdir -p "$report" || exit 1
report=$(cd "$report" && pwd) || exit 1
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
# Transformer Engine finds CUDA's libraries where pip put them beside torch.
libraries=$("$python" -c 'import glob, site; print(":".join(g for s in site.getsitepackages() for g in glob.glob(s + "/nvidia/*/lib")))')
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE # dozens of processes import the same modules
cd "$root" || exit 1

failed=0

tell() {
    printf '%s\n' "$*" | tee -a "$report/summary.txt"
}

# judge NAME STATUS SECONDS: says how a part ended, and remembers if it failed.
judge() {
    local how="ok"
    if [[ $2 -eq 124 || $2 -eq 137 ]]; then
        how="FAILED: ended at its time limit"
    elif [[ $2 -ne 0 ]]; then
        how="FAILED: exit code $2"
    fi
    [[ $2 -eq 0 ]] || failed=1
    tell "$(printf '%-42s %4s s  %s' "$1" "$3" "$how")"
    return "$2"
}

# part NAME LIMIT_SECONDS OUTPUT COMMAND...: standard output to a file, errors to the same one unless it is JSON.
part() {
    local name=$1 limit=$2 output=$report/$3 errors=$report/$3 start=$SECONDS status=0
    shift 3
    [[ $output != *.json ]] || errors=$report/benchmarks.log
    timeout --kill-after="$KILL_AFTER" "$((limit * patience))" "$@" >>"$output" 2>>"$errors" </dev/null || status=$?
    judge "$name" "$status" "$((SECONDS - start))"
}

probe() {
    cat <<'PYTHON'
import importlib, importlib.metadata, platform, subprocess, sys

missing = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        missing.append(f"{name} ({type(error).__name__}: {error})")
if missing:
    sys.exit("add to the site folder: " + "; ".join(missing))
import torch
from transformer_engine.pytorch import is_fp8_available

print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)
for name in ("megatron-core", "transformer-engine", "triton", "numpy"):
    print(name, importlib.metadata.version(name))
if not torch.cuda.is_available():
    sys.exit("torch finds no usable GPU: all tests would be skipped")
import megatron_fanformer.model.layer_spec as layers

if problem := layers.transformer_engine_problem():
    sys.exit(f"Transformer Engine: {problem}")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), "FP8", is_fp8_available())
subprocess.run(["nvidia-smi"], check=True)
PYTHON
}

# test_file FILE: runs one file of tests; leaves what it printed, and how and when it ended.
test_file() {
    local name start=$SECONDS status=0
    name=$(basename "$1" .py)
    # The tests' own conftest imports what a machine for GPU checks need not have.
    OMP_NUM_THREADS=2 timeout --kill-after="$KILL_AFTER" "$((TEST_SECONDS * patience))" "$python" -m pytest "$1" \
        --confcutdir=tests/gpu -p no:cacheprovider -v --color=no \
        --timeout="$((TEST_SECONDS * patience))" >"$report/$name.part" 2>&1 </dev/null || status=$?
    echo "$status $((SECONDS - start))" >"$report/$name.end"
}

tests() {
    local file name status seconds failures=0
    for file in tests/gpu/test_*.py; do
        while (($(jobs -rp | wc -l) >= $(nproc))); do
            wait -n
        done
        test_file "$file" &
    done
    wait
    for file in tests/gpu/test_*.py; do
        name=$(basename "$file" .py)
        read -r status seconds <"$report/$name.end" || { status=1 seconds=0; }
        judge "$name" "$status" "$seconds" || failures=1
    done
    for file in "$report"/*.part; do
        printf '\n==== %s\n' "$(basename "$file" .part)"
        cat "$file"
    done >"$report/tests.log"
    rm -f "$report"/*.part "$report"/*.end
    return "$failures"
}

tell "$(date -u +%Y-%m-%dT%H:%MZ) commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
# shellcheck disable=SC2086  # MODULES is a list
if ! part "machine" "$PROBE_SECONDS" machine.txt "$python" -c "$(probe)" $MODULES; then
    tail -n 5 "$report/machine.txt" >&2
    exit 1
fi
tests
part "bench_fan" "$FAN_SECONDS" bench_fan.json "$python" tools/bench_fan.py --device cuda "${fan_size[@]}" --json
part "bench_loss_head" "$HEAD_SECONDS" bench_loss_head.json "$python" tools/bench_loss_head.py --device cuda \
    --dtype bf16 "${head_size[@]}" --json
part "bench_train" "$TRAIN_SECONDS" bench_train.log "$python" tools/bench_train.py --device cuda --dtypes bf16 fp8 \
    "${train_size[@]}" --json "$report/bench_train.json"
tell "report in $report"
exit "$failed"
