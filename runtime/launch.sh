#!/usr/bin/env bash
# Starts Triton Inference Server on a model repository, reachable from this machine alone:
#
#     runtime/launch.sh REPOSITORY [further options of tritonserver, with full paths]
#
# Takes `tritonserver` from PATH; $TRITONSERVER names another. $BPKV_HOST, $BPKV_HTTP_PORT, $BPKV_GRPC_PORT and
# $BPKV_METRICS_PORT say where it listens, $BPKV_EXIT_TIMEOUT_S how long running requests get after SIGTERM, and
# $BPKV_ADMIN_KEY what the header `bpkv-admin-key` must hold for what is not for clients.
# Ends with the server's exit code, or with 70 where the model's process died: whatever watches this script, such as
# systemd or Docker, then starts it again. (The server itself would answer errors from there on, and call itself ready.)
set -euo pipefail
shopt -s globasciiranges

server=${TRITONSERVER:-tritonserver}
host=${BPKV_HOST:-127.0.0.1}
key=${BPKV_ADMIN_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')} # nobody knows it where none was given
closed=model-repository,shared-memory,statistics,trace,logging
prefix=bpkv$$_ # of the shared memory

fail() {
  echo "launch.sh: $1" >&2
  exit 2
}
[ $# -gt 0 ] || fail "give a repository: runtime/launch.sh REPOSITORY [further options of tritonserver]"
repository=$1
shift
for name in BPKV_HTTP_PORT BPKV_GRPC_PORT BPKV_METRICS_PORT; do
  port=${!name:-8000}
  [[ $port =~ ^[1-9][0-9]{0,4}$ ]] && [ "$port" -lt 65536 ] || fail "$name is $port; give a port from 1 to 65535"
done
exit_timeout=${BPKV_EXIT_TIMEOUT_S:-30}
[[ $exit_timeout =~ ^[0-9]{1,9}$ ]] || fail "BPKV_EXIT_TIMEOUT_S is $exit_timeout; give a whole number of seconds"
[ -f "$repository/bpkv/config.pbtxt" ] || fail "$repository holds no model; write one with: bpkv model-repository --output $repository --model M"
# Without it the server waits for ever.
[ -f "$repository/bpkv/1/model.py" ] || fail "$repository/bpkv/1/model.py is missing; write the repository again"
repository=$(realpath "$repository")
[[ $repository != *[!A-Za-z0-9_./+=,@:%-]* ]] || fail "$repository has blanks, quotes or letters beyond ASCII, from which Triton starts no model; move it"
command -v "$server" > /dev/null || fail "there is no $server on PATH; install Triton Inference Server, or see docs/serving.md"
server=$(realpath -s "$(command -v "$server")")

root=$(cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." && pwd)
if [ -d "$root/bpkv_trt" ]; then # a checkout, whose environment may hold dependencies only
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  cd "$root" # the Python of Triton 2.51 looks for packages here, and not by that variable
fi

limits=() # which only later servers have; the model has limits of its own
if "$server" --help 2>&1 | grep -q -- --http-max-input-size; then
  limits+=(--http-max-input-size=67108864)
fi

"$server" --model-repository="$repository" \
  --model-control-mode=none --disable-auto-complete-config --exit-on-error=true \
  --http-address="$host" --grpc-address="$host" --metrics-address="$host" \
  --http-port="${BPKV_HTTP_PORT:-8000}" --grpc-port="${BPKV_GRPC_PORT:-8001}" --metrics-port="${BPKV_METRICS_PORT:-8002}" \
  --http-restricted-api="$closed:bpkv-admin-key=$key" --grpc-restricted-protocol="$closed:bpkv-admin-key=$key" \
  --exit-timeout-secs="$exit_timeout" \
  --backend-config="python,shm-region-prefix-name=$prefix" \
  "${limits[@]}" "$@" &
pid=$!
model= # its process, once it is there
trap 'kill -TERM "$pid" 2> /dev/null || true' TERM INT HUP QUIT
trap clean_up EXIT

# What a server that did not end by itself leaves behind: itself, a model that hangs, and shared memory.
clean_up() {
  if runs "$pid"; then
    kill -KILL "$pid" 2> /dev/null || true
  fi
  if [ -n "$model" ] && is_model "$model"; then
    kill -KILL "$model" 2> /dev/null || true
  fi
  rm -f "/dev/shm/$prefix"*
}

is_model() {
  grep -qs triton_python_b "/proc/$1/comm"
}

# The model's process: the server's child that runs the stub of its Python backend.
model_process() {
  local child
  for child in $(cat "/proc/$pid/task/"*/children 2> /dev/null); do
    if is_model "$child"; then
      echo "$child"
      return
    fi
  done
}

# Whether a process runs: one that has died stays in the table until its parent asks for it.
runs() {
  [ -r "/proc/$1/stat" ] && ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"
}

alone=0 # seconds that the server has been without its model; one that ends is so for a moment
code=
while runs "$pid" && [ "$alone" -lt 5 ]; do
  if [ -z "$model" ]; then
    model=$(model_process)
  elif ! runs "$model"; then
    alone=$((alone + 1))
  fi
  sleep 1 &
  wait $! || true # a signal ends the wait, not the sleep
done
if runs "$pid"; then
  echo "launch.sh: the model's process has died; ending the server" >&2
  kill -KILL "$pid"
  code=70
fi
ended=0
wait "$pid" 2> /dev/null || ended=$? # without what bash says of a killed child
exit "${code:-$ended}"
