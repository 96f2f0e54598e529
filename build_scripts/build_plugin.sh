#!/usr/bin/env bash
# Build the TensorRT plugin: libbpkv_plugin.so and libbpkv_plugin.json. No GPU, and no TensorRT library, is needed.
set -euo pipefail
unset CDPATH # with it, cd prints, and may go elsewhere

usage() {
  cat <<'END'
Usage: build_plugin.sh --output DIR [--build-type TYPE] [--jobs N]
       build_plugin.sh --cmake-options

Builds the TensorRT plugin and writes DIR/libbpkv_plugin.so, with what is known of it in DIR/libbpkv_plugin.json.

  --output DIR       where to write; made if it is not there
  --build-type TYPE  Release (default), RelWithDebInfo, MinSizeRel or Debug
  --jobs N           compile so many files at once; default: one for each processor
  --cmake-options    only print the headers that are found, as options for `cmake -S plugins`
  --help             print this

It takes cmake 3.22 or later, a C++17 compiler (CXX, default c++), and headers, which are looked for in this order:
  TensorRT  TENSORRT_INCLUDE_DIR; TENSORRT_ROOT and the usual places; the PyPI package kernel-lens==2.0.1
  CUDA      CUDA_HOME, CUDA_PATH, /usr/local/cuda*, the place of nvcc; the PyPI packages nvidia-cuda-runtime and
            nvidia-cuda-crt
  NVTX 3    beside CUDA's; the PyPI package nvidia-nvtx
PyPI packages are those of the Python that PYTHON names, default python3. Build for the TensorRT that will load the
plugin: its major version must be the same.
END
}

# One paragraph: what, why, what to do next.
fail() {
  echo "build_plugin.sh: $*" >&2
  exit 2
}

# The first of the folders that has all of the files before "--".
first_with() {
  local files=() folder file
  while [[ $1 != -- ]]; do files+=("$1"); shift; done
  shift
  for folder in "$@"; do
    for file in "${files[@]}"; do [[ -f $folder/$file ]] || continue 2; done
    (cd "$folder" && pwd)
    return
  done
  return 1
}

# Folders of headers in Python packages, without importing any.
python_include_folders() {
  "${PYTHON:-python3}" - 2>/dev/null <<'END' || true
import glob, importlib.util, os

def folders(package):
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or []) if spec else []

for folder in folders("kernel_lens"):
    print(os.path.join(folder, "include", "tensorrt"))
for folder in folders("nvidia"):
    print(*sorted(glob.glob(os.path.join(glob.escape(folder), "*", "include")), reverse=True), sep="\n")
END
}

find_headers() {
  local installed=(/usr/include/x86_64-linux-gnu /usr/include/aarch64-linux-gnu /usr/include
    /usr/local/tensorrt/include /opt/tensorrt/include /usr/local/TensorRT/include /opt/TensorRT/include)
  local toolkits=() packages=() root nvcc
  mapfile -t packages < <(python_include_folders)

  if [[ -n ${TENSORRT_INCLUDE_DIR:-} ]]; then
    tensorrt=$(first_with NvInferRuntime.h NvInferVersion.h -- "$TENSORRT_INCLUDE_DIR") ||
      fail "TENSORRT_INCLUDE_DIR is '$TENSORRT_INCLUDE_DIR', where there is no NvInferRuntime.h; set it to the include" \
        "folder of TensorRT, or unset it to look in the usual places."
  else
    if [[ -n ${TENSORRT_ROOT:-} ]]; then installed=("$TENSORRT_ROOT/include" "$TENSORRT_ROOT" "${installed[@]}"); fi
    tensorrt=$(first_with NvInferRuntime.h NvInferVersion.h -- "${installed[@]}" "${packages[@]}") ||
      fail "TensorRT's headers (NvInferRuntime.h) are not found; set TENSORRT_INCLUDE_DIR to their folder, or get" \
        "those of TensorRT 10.14 with: ${PYTHON:-python3} -m pip install --no-deps kernel-lens==2.0.1"
  fi

  for root in "${CUDA_HOME:-}" "${CUDA_PATH:-}"; do
    if [[ -n $root ]]; then toolkits+=("$root/include"); fi
  done
  toolkits+=(/usr/local/cuda/include /usr/local/cuda*/include)
  if nvcc=$(command -v nvcc); then toolkits+=("$(dirname "$(dirname "$(readlink -f "$nvcc")")")/include"); fi
  cuda=$(first_with cuda.h cuda_runtime_api.h crt/host_defines.h -- "${toolkits[@]}" "${packages[@]}") ||
    fail "CUDA's headers (cuda.h, cuda_runtime_api.h, crt/host_defines.h) are not found; set CUDA_HOME to a CUDA" \
      "toolkit, or get them with: ${PYTHON:-python3} -m pip install nvidia-cuda-runtime nvidia-cuda-crt"
  nvtx=$(first_with nvtx3/nvToolsExt.h -- "$cuda" "${packages[@]}") ||
    fail "NVTX's headers (nvtx3/nvToolsExt.h) are not found; set CUDA_HOME to a CUDA toolkit, or get them with:" \
      "${PYTHON:-python3} -m pip install nvidia-nvtx"
  cmake_options=("-DTENSORRT_INCLUDE_DIR=$tensorrt" "-DCUDA_INCLUDE_DIR=$cuda" "-DNVTX_INCLUDE_DIR=$nvtx")
}

output='' build_type=Release jobs=$(getconf _NPROCESSORS_ONLN) only_options=''
while (($#)); do
  if [[ $1 == --?*=* ]]; then set -- "${1%%=*}" "${1#*=}" "${@:2}"; fi
  option=$1
  case $option in
    --help | -h) usage; exit ;;
    --cmake-options) only_options=yes; shift; continue ;;
    --output | --build-type | --jobs) ;;
    *) fail "'$option' is no option; --help lists them." ;;
  esac
  if (($# < 2)) || [[ -z $2 ]]; then fail "$option has no value; --help says what it takes."; fi
  case $option in
    --output) output=$2 ;;
    --build-type) build_type=$2 ;;
    --jobs) jobs=$2 ;;
  esac
  shift 2
done

if [[ -n $only_options ]]; then
  find_headers
  printf '%q\n' "${cmake_options[@]}"
  exit
fi
[[ -n $output ]] || fail "--output is missing; name the folder for the library, such as --output out/plugin."
case $build_type in
  Release | RelWithDebInfo | MinSizeRel | Debug) ;;
  *) fail "--build-type is '$build_type'; give Release, RelWithDebInfo, MinSizeRel or Debug." ;;
esac
[[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs is '$jobs'; give a number from 1."
command -v cmake >/dev/null || fail "cmake is not found; install cmake 3.22 or later, for example: pip install cmake"
compiler=${CXX:-c++} # may have arguments, as in "ccache g++", which CMake takes from CXX too
command -v "$compiler" >/dev/null || command -v "${compiler%% *}" >/dev/null ||
  fail "the C++ compiler '$compiler' is not found; install g++ 9 or later, or set CXX to a C++17 compiler."
find_headers
plugins=$(cd "$(dirname "${BASH_SOURCE[0]}")/../plugins" && pwd)
work=$(mktemp -d)
staged='' made=() # folders that were not there, the deepest first: what stays empty of them goes again
trap 'rm -rf "$work" ${staged:+"$staged"}; rmdir -- "${made[@]}" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for folder in "$plugins" "$tensorrt" "$cuda" "$nvtx" "$work"; do
  [[ $folder != *\;* ]] || fail "'$folder' has a ';', at which CMake ends a path; move or rename that folder."
done

folder=$output
while [[ ! -e $folder ]]; do
  made+=("$folder")
  folder=$(dirname -- "$folder")
done
mkdir -p -- "$output" 2>/dev/null || fail "the output '$output' is no folder that can be made; name another."
output=$(cd -- "$output" && pwd)
staged=$(mktemp -d "$output/.bpkv_plugin.XXXXXX" 2>/dev/null) ||
  fail "the output '$output' cannot be written to; name another folder, or change its permissions."

echo "TensorRT headers: $tensorrt"
echo "CUDA headers: $cuda"
echo "NVTX headers: $nvtx"
if ! {
  cmake -S "$plugins" -B "$work" "-DCMAKE_BUILD_TYPE=$build_type" "${cmake_options[@]}" &&
    cmake --build "$work" --parallel "$jobs" --target bpkv_plugin
} >"$work/log" 2>&1; then
  tail -n 40 "$work/log" >&2
  echo "build_plugin.sh: the build failed, for the reason above; '$output' is as it was." >&2
  exit 1
fi

cp "$work/libbpkv_plugin.so" "$work/libbpkv_plugin.json" "$staged/"
trap '' INT TERM # the pair is replaced as a whole
mv -f "$staged/libbpkv_plugin.so" "$staged/libbpkv_plugin.json" "$output/"
echo "Wrote $output/libbpkv_plugin.so ($(wc -c <"$output/libbpkv_plugin.so") bytes) and libbpkv_plugin.json"
