#!/usr/bin/env bash
# From a Hugging Face model to a TensorRT-LLM engine with BP-KV in it.
set -euo pipefail

usage() {
  cat <<'END'
Usage: build_engine.sh --model DIR --output DIR [--dtype TYPE] [--tp-size N] [--checkpoint DIR] [OPTION ...]

Converts a Hugging Face model and builds an engine whose KV cache is compacted, by TensorRT-LLM's own conversion and
`bpkv-trtllm-build --plugin bpkv`. The plugin's library is built first where none is found.

  --model DIR       the model: config.json and weights
  --output DIR      where the engine goes
  --dtype TYPE      auto (default), float16, bfloat16 or float32
  --tp-size N       ranks of tensor parallelism, one GPU each; default 1, and more than that are built, but no session of
                    bpkv runs them
  --checkpoint DIR  keep the converted checkpoint there; one that is there already is used as it is
  --help            print this

Every OPTION goes to bpkv-trtllm-build, such as --bpkv_budget 0.2 or --max_input_len 32768; its --help lists them.
It takes TensorRT-LLM 1.0 to 1.2 with a GPU, in the Python that PYTHON names, default python3.
END
}

# One paragraph: what, why, what to do next.
fail() {
  echo "build_engine.sh: $*" >&2
  exit 2
}

model='' output='' dtype=auto ranks=1 checkpoint='' library='' options=()
while (($#)); do
  case $1 in
    --help | -h) usage; exit ;;
    --model | --output | --dtype | --tp-size | --checkpoint)
      if (($# < 2)) || [[ -z $2 ]]; then fail "$1 has no value; --help says what it takes."; fi
      case $1 in
        --model) model=$2 ;;
        --output) output=$2 ;;
        --dtype) dtype=$2 ;;
        --tp-size) ranks=$2 ;;
        --checkpoint) checkpoint=$2 ;;
      esac
      shift 2
      ;;
    --checkpoint_dir* | --model_config* | --output_dir*)
      fail "$1 is set by this script: give --model, --output and --checkpoint."
      ;;
    --plugin-lib* | --plugin_lib*) library=given; options+=("$1"); shift ;;
    *) options+=("$1"); shift ;;
  esac
done
[[ -n $model ]] || fail "--model is missing; name the folder of a Hugging Face model."
[[ -n $output ]] || fail "--output is missing; name the folder for the engine."
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "--tp-size is '$ranks'; give a number from 1."

clone=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$clone${PYTHONPATH:+:$PYTHONPATH}"
# What no conversion could read is refused before the library is built.
[[ (-n $checkpoint && -f $checkpoint/config.json) || -f $model/config.json ]] ||
  fail "the model '$model' has no config.json; check the path, which is the folder of a Hugging Face model, and no id."
work=''
trap 'if [[ -n $work ]]; then rm -rf "$work"; fi' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ -z $library && -z ${BPKV_PLUGIN_PATH:-} ]] && ! "$python" -c 'from bpkv_trt.trtllm.plugin_library import locate; locate()' \
  2>/dev/null; then
  bash "$clone/build_scripts/build_plugin.sh" --output "$clone/out/plugin"
fi
if [[ -z $checkpoint ]]; then
  work=$(mktemp -d)
  checkpoint=$work/checkpoint
fi
if [[ ! -f $checkpoint/config.json ]]; then
  "$python" "$clone/build_scripts/convert_checkpoint.py" \
    --model "$model" --output "$checkpoint" --dtype "$dtype" --tp-size "$ranks"
fi
"$python" -m bpkv_trt.trtllm.build --checkpoint_dir "$checkpoint" --output_dir "$output" --workers "$ranks" \
  --plugin bpkv ${options[@]+"${options[@]}"}
