# Writes OUTPUT, what is known of LIBRARY, as JSON. Run by cmake -P after the library is linked.

function(read_version result file pattern)
  file(STRINGS "${file}" lines REGEX "${pattern}")
  list(GET lines 0 line)
  string(REGEX REPLACE "${pattern}" "\\1" version "${line}")
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

foreach(part MAJOR MINOR PATCH)
  file(STRINGS "${TENSORRT_INCLUDE_DIR}/NvInferVersion.h" lines REGEX "#define (NV_TENSORRT|TRT)_${part}(_ENTERPRISE)? [0-9]+")
  list(GET lines 0 line)
  string(REGEX MATCH "[0-9]+" ${part} "${line}")
endforeach()
read_version(cuda "${CUDA_INCLUDE_DIR}/cuda.h" "^#define CUDA_VERSION ([0-9]+).*")
math(EXPR cuda_major "${cuda} / 1000")
math(EXPR cuda_minor "${cuda} % 1000 / 10")
read_version(release "${PACKAGE}/__init__.py" "^__version__ = \"(.*)\"")
file(SHA256 "${LIBRARY}" sha256)
file(SIZE "${LIBRARY}" bytes)
get_filename_component(name "${LIBRARY}" NAME)

file(WRITE "${OUTPUT}" "{
  \"schema_version\": 1,
  \"library\": \"${name}\",
  \"sha256\": \"${sha256}\",
  \"bytes\": ${bytes},
  \"plugin\": \"BpkvScore\",
  \"version\": \"1\",
  \"namespace\": \"bpkv\",
  \"abi\": 1,
  \"tensorrt\": \"${MAJOR}.${MINOR}.${PATCH}\",
  \"cuda_headers\": \"${cuda_major}.${cuda_minor}\",
  \"targets\": [\"80\", \"86\", \"89\", \"90a\", \"100a\", \"120a\"],
  \"compiler\": \"${COMPILER}\",
  \"bpkv_version\": \"${release}\"
}
")
